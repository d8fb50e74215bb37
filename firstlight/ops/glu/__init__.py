"""Gated linear unit."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "glu",
        "act(gate) * up; silu or clamped silu",
        Impl("ref", "firstlight.ops.glu.ref:glu"),
        Impl("eager", "firstlight.ops.glu.eager:glu", rank=10),
    )
