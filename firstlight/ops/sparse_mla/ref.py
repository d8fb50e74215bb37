"""Latent attention over chosen tokens, expanded. Reference, fp32.

    o[t, h] = sum_{s in slots[t], s >= 0} softmax_s( scaling (q_nope . k_nope[s] + q_rope . k_rope[s]) ) v[s]
    [k_nope[s, h], v[s, h]] = W[h] c[s] ; a token without any slot gives zeros

Shapes: T tokens, K chosen slots (-1 = none), H heads, N nope dim, R rope dim (may be 0), C latent dim, V value dim;
latent row [c (C) | k_rope (R)] by physical slot; kv_b_weight [H (N + V), C].
Source: DeepSeek-V3.2 (2025) section 2.1; transformers 5.23 modeling_deepseek_v32.py DeepseekV32Attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged


def sparse_mla(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latent: Paged,
    slots_TK: Tensor,
    kv_b_weight: Tensor,
    *,
    scaling: float,
    v_head_dim: int,
) -> Tensor:
    """Return the attention output [T, H, V] in q.dtype."""
    num_tokens, num_heads, nope_dim = q_nope_THN.shape
    w_HXC = kv_b_weight.float().view(num_heads, nope_dim + v_head_dim, -1)
    latent_dim = w_HXC.shape[2]
    out_THV = q_nope_THN.new_zeros(num_tokens, num_heads, v_head_dim)
    for t in range(num_tokens):
        chosen = slots_TK[t][slots_TK[t] >= 0].long()
        if chosen.numel() == 0:
            continue
        latent_SL = latent.flat()[chosen].float()
        kv_SHX = torch.einsum("hxc,sc->shx", w_HXC, latent_SL[:, :latent_dim])
        k_SHN, v_SHV = kv_SHX[..., :nope_dim], kv_SHX[..., nope_dim:]
        scores_HS = torch.einsum("hn,shn->hs", q_nope_THN[t].float(), k_SHN)
        scores_HS += q_rope_THR[t].float() @ latent_SL[:, latent_dim:].T
        probs_HS = torch.softmax(scores_HS * scaling, dim=1)
        out_THV[t] = torch.einsum("hs,shv->hv", probs_HS, v_SHV).to(out_THV.dtype)
    return out_THV
