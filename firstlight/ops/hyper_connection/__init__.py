"""Several residual streams mixed by learned weights."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "hyper_read",
        "mixes the streams into a block input; post and comb weights",
        Impl("ref", "firstlight.ops.hyper_connection.ref:hyper_read"),
        Impl("eager", "firstlight.ops.hyper_connection.eager:hyper_read", rank=10),
    )
    table.register(
        "hyper_write",
        "adds the block output to the mixed streams",
        Impl("ref", "firstlight.ops.hyper_connection.ref:hyper_write"),
        Impl("eager", "firstlight.ops.hyper_connection.eager:hyper_write", rank=10),
    )
    table.register(
        "hyper_head",
        "mean of the streams",
        Impl("ref", "firstlight.ops.hyper_connection.ref:hyper_head"),
        Impl("eager", "firstlight.ops.hyper_connection.eager:hyper_head", rank=10),
    )
