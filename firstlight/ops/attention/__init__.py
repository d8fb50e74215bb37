"""Grouped-query attention over paged keys and values."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "attention",
        "causal softmax attention; optional window and sinks",
        Impl("ref", "firstlight.ops.attention.ref:attention"),
        Impl("eager", "firstlight.ops.attention.eager:attention", rank=10),
    )
