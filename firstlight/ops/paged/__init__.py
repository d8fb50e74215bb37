"""Per-token entries in pages: writing them."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "cache_write",
        "writes one entry per token at its position",
        Impl("ref", "firstlight.ops.paged.ref:cache_write"),
        Impl("eager", "firstlight.ops.paged.eager:cache_write", rank=10),
    )
