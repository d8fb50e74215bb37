"""Rotary position embedding of the first 2F dims of every head."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "rope",
        "rotates pairs by position * inv_freq; half or interleave layout",
        Impl("ref", "firstlight.ops.rope.ref:rope"),
        Impl("eager", "firstlight.ops.rope.eager:rope", rank=10),
    )
