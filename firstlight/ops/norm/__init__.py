"""Normalisation over the last dimension: rms, layer, gated rms."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "rms_norm",
        "x rsqrt(mean x^2 + eps) w, or (1 + w)",
        Impl("ref", "firstlight.ops.norm.ref:rms_norm"),
        Impl("eager", "firstlight.ops.norm.eager:rms_norm", rank=10),
    )
    table.register(
        "layer_norm",
        "(x - mean) rsqrt(var + eps) w + b",
        Impl("ref", "firstlight.ops.norm.ref:layer_norm"),
        Impl("eager", "firstlight.ops.norm.eager:layer_norm", rank=10),
    )
    table.register(
        "gated_rms_norm",
        "w rms(x) act(gate) or w rms(x act(gate)), all in fp32",
        Impl("ref", "firstlight.ops.norm.ref:gated_rms_norm"),
        Impl("eager", "firstlight.ops.norm.eager:gated_rms_norm", rank=10),
    )
