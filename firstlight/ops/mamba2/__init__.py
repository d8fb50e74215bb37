"""State-space recurrence of Mamba-2."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "mamba2",
        "S <- exp(dt A) S + dt x B^T; y = S C + D x",
        Impl("ref", "firstlight.ops.mamba2.ref:mamba2"),
        Impl("eager", "firstlight.ops.mamba2.eager:mamba2", rank=10),
    )
