"""Grouped-query attention, plain torch: scaled_dot_product_attention per row, a plain softmax where sinks need one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    for row, start, n, tokens in rows.spans():
        if n == 0:
            continue
        # keys before the first window of the row are never read
        first = 0 if sliding_window is None else max(0, start + 1 - sliding_window)
        entries_S = torch.arange(first, start + n, device=q_TND.device)
        kv_S2MD = kv.flat()[kv.slots(torch.full_like(entries_S, row), entries_S)].to(q_TND.dtype)
        k_MSD, v_MSD = kv_S2MD[:, 0].transpose(0, 1), kv_S2MD[:, 1].transpose(0, 1)
        positions_n = torch.arange(start, start + n, device=q_TND.device)
        q_nND = q_TND[tokens]
        if sinks_N is not None:
            out_TND[tokens] = _with_sinks(q_nND, k_MSD, v_MSD, positions_n, entries_S, scaling, sliding_window, sinks_N)
        elif n == 1:
            # the heads of a group act as the queries of one key head: no key is repeated
            q_MGD = q_nND.reshape(k_MSD.shape[0], -1, q_nND.shape[2])
            o_MGD = F.scaled_dot_product_attention(q_MGD[None], k_MSD[None], v_MSD[None], scale=scaling)
            out_TND[tokens] = o_MGD.reshape(1, q_nND.shape[1], -1)
        else:
            causal = start == 0 and sliding_window is None
            mask_nS = None if causal else _visible(positions_n, entries_S, sliding_window)
            o_NnD = F.scaled_dot_product_attention(
                q_nND.transpose(0, 1)[None],
                k_MSD[None],
                v_MSD[None],
                attn_mask=mask_nS,
                is_causal=causal,
                scale=scaling,
                enable_gqa=True,
            )
            out_TND[tokens] = o_NnD[0].transpose(0, 1)
    return out_TND


def _visible(positions_n: Tensor, entries_S: Tensor, sliding_window: int | None) -> Tensor:
    distance_nS = positions_n[:, None] - entries_S
    visible_nS = distance_nS >= 0
    return visible_nS if sliding_window is None else visible_nS & (distance_nS < sliding_window)


def _with_sinks(
    q_nND: Tensor,
    k_MSD: Tensor,
    v_MSD: Tensor,
    positions_n: Tensor,
    entries_S: Tensor,
    scaling: float,
    sliding_window: int | None,
    sinks_N: Tensor,
) -> Tensor:
    """Return softmax attention [n, N, D] with one more logit per head, whose probability is dropped."""
    num_groups = k_MSD.shape[0]
    k32_MSD, v32_MSD = k_MSD.float(), v_MSD.float()
    sinks_MG11 = sinks_N.float().view(num_groups, -1, 1, 1)
    outputs: list[Tensor] = []
    for q_cND, positions_c in zip(
        torch.split(q_nND, SINK_CHUNK_TOKENS), torch.split(positions_n, SINK_CHUNK_TOKENS), strict=True
    ):
        q_MGcD = q_cND.float().reshape(q_cND.shape[0], num_groups, -1, q_cND.shape[2]).permute(1, 2, 0, 3)
        scores = q_MGcD @ k32_MSD[:, None].transpose(-1, -2) * scaling
        scores = scores.masked_fill(~_visible(positions_c, entries_S, sliding_window), float("-inf"))
        peak = torch.maximum(scores.amax(-1, keepdim=True), sinks_MG11)
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True) + torch.exp(sinks_MG11 - peak)
        o_MGcD = (weights @ v32_MSD[:, None]) / total
        outputs.append(o_MGcD.flatten(0, 1).transpose(0, 1).to(q_nND.dtype))
    return torch.cat(outputs)
