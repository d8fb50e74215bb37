"""Multi-head latent attention: one cached row per token serves all heads."""

from __future__ import annotations

from firstlight.ops.registry import Impl, OperatorTable
from firstlight.spec.bind import BindContext


def _absorbed_rejects(ctx: BindContext) -> str | None:
    if ctx.stage != "decode":
        return "absorbed form reads the latent rows directly: cheaper only for short rows (decode)"
    return None


def register(table: OperatorTable) -> None:
    """Add the operators of this folder."""
    table.register(
        "mla",
        "causal attention over latent rows [c | k_rope]",
        Impl("ref", "firstlight.ops.mla.ref:mla"),
        Impl("eager", "firstlight.ops.mla.eager:mla", rank=10),
        Impl("absorbed", "firstlight.ops.mla.eager:mla_absorbed", rejects=_absorbed_rejects, rank=20),
    )
