"""Grouped-query attention over paged keys and values. Reference, fp32.

    o[t, n] = sum_s p_s v[s, n // G] ; p = softmax over { scaling q[t, n] . k[s, n // G] } and, with sinks, { sink[n] }
    s runs over pos - window < s <= pos (no window: 0 <= s <= pos); the probability of the sink is dropped.

Shapes: T tokens, N query heads, D head dim, G = N / Nkv; kv.data [P, E, 2, Nkv, D], keys first.
Source: Ainslie et al. 2023 (GQA); transformers 5.23 modeling_gpt_oss.py eager_attention_forward (sinks, window).
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows


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
    num_heads = q_TND.shape[1]
    for row, start, n, tokens in rows.spans():
        kv_S2MD = kv.read(row, start + n).float()
        k_SND, v_SND = kv_S2MD.repeat_interleave(num_heads // kv_S2MD.shape[2], dim=2).unbind(1)
        for t in range(n):
            stop = start + t + 1
            first = 0 if sliding_window is None else max(0, stop - sliding_window)
            scores_NS = torch.einsum("nd,snd->ns", q_TND[tokens][t].float(), k_SND[first:stop]) * scaling
            if sinks_N is not None:
                scores_NS = torch.cat([scores_NS, sinks_N.float()[:, None]], dim=1)
            probs_NS = torch.softmax(scores_NS, dim=1)[:, : stop - first]
            out_TND[tokens][t] = torch.einsum("ns,snd->nd", probs_NS, v_SND[first:stop]).to(q_TND.dtype)
    return out_TND
