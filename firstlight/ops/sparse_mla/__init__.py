"""Latent attention over a selected set of tokens."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "sparse_mla",
        "latent attention over chosen slots; -1 ignored",
        Impl("ref", "firstlight.ops.sparse_mla.ref:sparse_mla"),
        Impl("eager", "firstlight.ops.sparse_mla.eager:sparse_mla", rank=10),
    )
