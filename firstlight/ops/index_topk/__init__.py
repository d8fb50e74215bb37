"""Index branch of sparse attention: score, select, pool the keys."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "index_topk",
        "scores the history per token and keeps the top-k slots",
        Impl("ref", "firstlight.ops.index_topk.ref:index_topk"),
        Impl("eager", "firstlight.ops.index_topk.eager:index_topk", rank=10),
    )
    table.register(
        "index_pool",
        "pools index keys by a softmax gate, keeps the open pool",
        Impl("ref", "firstlight.ops.index_topk.ref:index_pool"),
        Impl("eager", "firstlight.ops.index_topk.pool:index_pool", rank=10),
    )
