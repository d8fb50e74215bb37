"""Multi-head latent attention, expanded. Reference, fp32.

    [k_nope[s, h], v[s, h]] = W[h] c[s] ; score = scaling (q_nope . k_nope + q_rope . k_rope)
    o[t, h] = sum_{s <= pos} softmax_s(score) v[s, h]

Shapes: T tokens, S cached tokens, H heads, N nope dim, R rope dim (may be 0), C latent dim, V value dim;
latent row [c (C) | k_rope (R)]; kv_b_weight [H (N + V), C], per head first N rows for k_nope, then V for v.
Source: DeepSeek-V2 (2024) section 2.1; transformers 5.23 modeling_deepseek_v3.py DeepseekV3Attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows


def mla(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latent: Paged,
    kv_b_weight: Tensor,
    rows: Rows,
    *,
    scaling: float,
    v_head_dim: int,
) -> Tensor:
    """Return the attention output [T, H, V] in q.dtype; the latent rows of this step are already in the cache."""
    num_tokens, num_heads, nope_dim = q_nope_THN.shape
    w_HXC = kv_b_weight.float().view(num_heads, nope_dim + v_head_dim, -1)
    latent_dim = w_HXC.shape[2]
    out_THV = q_nope_THN.new_zeros(num_tokens, num_heads, v_head_dim)
    for row, start, n, tokens in rows.spans():
        latent_SL = latent.read(row, start + n).float()
        kv_SHX = torch.einsum("hxc,sc->shx", w_HXC, latent_SL[:, :latent_dim])
        k_SHN, v_SHV = kv_SHX[..., :nope_dim], kv_SHX[..., nope_dim:]
        for t in range(n):
            stop = start + t + 1
            scores_HS = torch.einsum("hn,shn->hs", q_nope_THN[tokens][t].float(), k_SHN[:stop])
            scores_HS += q_rope_THR[tokens][t].float() @ latent_SL[:stop, latent_dim:].T
            probs_HS = torch.softmax(scores_HS * scaling, dim=1)
            out_THV[tokens][t] = torch.einsum("hs,shv->hv", probs_HS, v_SHV[:stop]).to(out_THV.dtype)
    return out_THV
