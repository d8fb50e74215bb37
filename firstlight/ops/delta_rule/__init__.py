"""Gated delta rule and its decay."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "decay_gate",
        "log decay in fp32; softplus or bounded form",
        Impl("ref", "firstlight.ops.delta_rule.ref:decay_gate"),
        Impl("eager", "firstlight.ops.delta_rule.eager:decay_gate", rank=10),
    )
    table.register(
        "delta_rule",
        "S <- Diag(exp g) S; S <- S + beta (v - S k) k^T; o = S q",
        Impl("ref", "firstlight.ops.delta_rule.ref:delta_rule"),
        Impl("eager", "firstlight.ops.delta_rule.eager:delta_rule", rank=10),
    )
