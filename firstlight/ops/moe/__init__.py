"""Mixture of experts: choice and weighted sum."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "router",
        "fp32 scores, grouped top-k, ties to the smaller expert",
        Impl("ref", "firstlight.ops.moe.ref:router"),
        Impl("eager", "firstlight.ops.moe.eager:router", rank=10),
    )
    table.register(
        "experts",
        "weighted sum of experts, gated or not",
        Impl("ref", "firstlight.ops.moe.ref:experts"),
        Impl("eager", "firstlight.ops.moe.eager:experts", rank=10),
    )
