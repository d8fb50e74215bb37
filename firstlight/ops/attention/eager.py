"""Grouped-query attention, plain torch: scaled_dot_product_attention per group of rows, a softmax where sinks need one.

R rows of n tokens, M key heads, G query heads per key head, S keys of the longest row, c tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.groups import Group
from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows

# bounds the fp32 score workspace of the sink path to N * 512 * S
SINK_CHUNK_TOKENS = 512


def attention(
    q_TND: Tensor,
    kv: Paged,
    rows: Rows,
    *,
    scaling: float,
    sliding_window: int | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return the attention output [T, N, D] in q.dtype; the keys of this step are already in the cache."""
    out_TND = torch.zeros_like(q_TND)
    for group in rows.groups:
        kv_RS2MD, visible_RnS = _history(kv, group, sliding_window, q_TND.dtype, masked=sinks_N is not None)
        k_RMSD, v_RMSD = kv_RS2MD.permute(2, 0, 3, 1, 4)
        q_RNnD = group.take(q_TND).transpose(1, 2)
        mask = None if visible_RnS is None else visible_RnS[:, None]
        if sinks_N is not None and mask is not None:
            o_RNnD = _with_sinks(q_RNnD, k_RMSD, v_RMSD, mask, scaling, sinks_N)
        elif group.n == 1:
            # the heads of a group act as the queries of one key head: no key is repeated
            q_RMGD = q_RNnD.reshape(group.size, k_RMSD.shape[1], -1, q_TND.shape[2])
            o_RMGD = F.scaled_dot_product_attention(q_RMGD, k_RMSD, v_RMSD, attn_mask=mask, scale=scaling)
            o_RNnD = o_RMGD.reshape(q_RNnD.shape)
        else:
            o_RNnD = F.scaled_dot_product_attention(
                q_RNnD, k_RMSD, v_RMSD, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        group.put(out_TND, o_RNnD.transpose(1, 2))
    return out_TND


def _history(
    kv: Paged, group: Group, window: int | None, dtype: torch.dtype, *, masked: bool
) -> tuple[Tensor, Tensor | None]:
    """Return keys and values [R, S, 2, M, D], and which of them a token sees [R, n, S].

    No mask where causality says it all, unless `masked`.
    """
    if window is None or window >= group.longest:
        return kv.read_group(group, dtype), group.visible() if masked or not group.plain else None
    entries, number_RS = kv.read_window(group, window, dtype)
    distance_RnS = group.position_Rn[..., None] - number_RS[:, None]
    return entries, (distance_RnS >= 0) & (distance_RnS < window)


def _with_sinks(
    q_RNnD: Tensor, k_RMSD: Tensor, v_RMSD: Tensor, visible_R1nS: Tensor, scaling: float, sinks_N: Tensor
) -> Tensor:
    """Return softmax attention [R, N, n, D] with one more logit per head, whose probability is dropped."""
    num_groups = k_RMSD.shape[1]
    k_RM1SD, v_RM1SD = k_RMSD.float()[:, :, None], v_RMSD.float()[:, :, None]
    sinks_MG11 = sinks_N.float().view(num_groups, -1, 1, 1)
    outputs: list[Tensor] = []
    for q_RNcD, visible_R1cS in zip(
        torch.split(q_RNnD, SINK_CHUNK_TOKENS, 2), torch.split(visible_R1nS, SINK_CHUNK_TOKENS, 2), strict=True
    ):
        q_RMGcD = q_RNcD.float().reshape(q_RNcD.shape[0], num_groups, -1, *q_RNcD.shape[2:])
        scores = q_RMGcD @ k_RM1SD.mT * scaling
        scores = scores.masked_fill(~visible_R1cS[:, None], float("-inf"))
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks_MG11)
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True) + torch.exp(sinks_MG11 - peak)
        outputs.append(((weights @ v_RM1SD) / total).flatten(1, 2).to(q_RNnD.dtype))
    return torch.cat(outputs, dim=2)
