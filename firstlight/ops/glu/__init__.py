"""Gated linear unit, and the activation of a unit without gate."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "glu",
        "act(gate) * up; silu, clamped silu or tanh gelu",
        Impl("ref", "firstlight.ops.glu.ref:glu"),
        Impl("eager", "firstlight.ops.glu.eager:glu", rank=10),
    )
    table.register(
        "activation",
        "act(x) of a unit without gate; squared relu",
        Impl("ref", "firstlight.ops.glu.ref:activation"),
        Impl("eager", "firstlight.ops.glu.eager:activation", rank=10),
    )
