"""Latent attention over chosen tokens, plain torch, absorbed: queries and outputs move into the latent space.

Letters as in ref.py; L = C + R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.paged.cache import Paged

# values of gathered latent rows held at once: 256 MiB in fp32
MAX_GATHERED = 1 << 26


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
    num_heads, nope_dim = q_nope_THN.shape[1:]
    w_HXC = kv_b_weight.to(q_nope_THN.dtype).view(num_heads, nope_dim + v_head_dim, -1)
    w_k_HNC, w_v_HVC = w_HXC[:, :nope_dim], w_HXC[:, nope_dim:]
    q_c_THC = (q_nope_THN.transpose(0, 1) @ w_k_HNC).transpose(0, 1)
    q_THL = torch.cat([q_c_THC, q_rope_THR], dim=-1)
    chunk_tokens = max(1, MAX_GATHERED // max(1, slots_TK.shape[1] * q_THL.shape[2]))
    o_THC = torch.zeros_like(q_c_THC)
    for begin in range(0, q_THL.shape[0], chunk_tokens):
        cut = slice(begin, begin + chunk_tokens)
        o_THC[cut] = _attend(q_THL[cut], latent, slots_TK[cut], w_HXC.shape[2], scaling)
    return (o_THC.transpose(0, 1) @ w_v_HVC.mT).transpose(0, 1)


def _attend(q_THL: Tensor, latent: Paged, slots_TK: Tensor, latent_dim: int, scaling: float) -> Tensor:
    valid_TK = slots_TK >= 0
    rows_TKL = latent.flat().index_select(0, slots_TK.clamp(min=0).flatten()).view(*slots_TK.shape, q_THL.shape[2])
    # a masked probability of 0 times NaN would still be NaN
    rows_TKL = rows_TKL.to(q_THL.dtype).masked_fill_(~valid_TK[..., None], 0.0)
    o_T1HC = F.scaled_dot_product_attention(
        q_THL[:, None],
        rows_TKL[:, None],
        rows_TKL[:, None, :, :latent_dim],
        attn_mask=valid_TK[:, None, None],
        scale=scaling,
    )
    return o_T1HC[:, 0].masked_fill(~valid_TK.any(1)[:, None, None], 0.0)
