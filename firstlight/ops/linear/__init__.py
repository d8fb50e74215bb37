"""Dense projection and embedding lookup."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "linear",
        "x W^T + b",
        Impl("ref", "firstlight.ops.linear.ref:linear"),
        Impl("eager", "firstlight.ops.linear.eager:linear", rank=10),
    )
    table.register(
        "embedding",
        "rows of a table by token id",
        Impl("ref", "firstlight.ops.linear.ref:embedding"),
        Impl("eager", "firstlight.ops.linear.eager:embedding", rank=10),
    )
