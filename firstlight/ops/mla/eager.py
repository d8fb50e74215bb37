"""Multi-head latent attention, plain torch: expanded per row, and absorbed.

mla expands keys and values of every cached token: cheap per query, so for rows of many tokens.
mla_absorbed moves W onto the query and the output and attends to the latent rows themselves.
Letters as in ref.py; L = C + R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    weight = kv_b_weight.to(q_nope_THN.dtype)
    q_HTD = torch.cat([q_nope_THN, q_rope_THR], dim=-1).transpose(0, 1)
    out_THV = q_nope_THN.new_zeros(num_tokens, num_heads, v_head_dim)
    for row, start, n, tokens in rows.spans():
        if n == 0:
            continue
        latent_SL = latent.read(row, start + n).to(weight.dtype)
        c_SC, k_rope_SR = latent_SL[:, : weight.shape[1]], latent_SL[:, weight.shape[1] :]
        kv_SHX = F.linear(c_SC, weight).view(start + n, num_heads, -1)
        k_nope_SHN, v_SHV = kv_SHX[..., :nope_dim], kv_SHX[..., nope_dim:]
        k_SHD = torch.cat([k_nope_SHN, k_rope_SR[:, None].expand(-1, num_heads, -1)], dim=-1)
        o_HnV = F.scaled_dot_product_attention(
            q_HTD[None, :, tokens],
            k_SHD.transpose(0, 1)[None],
            v_SHV.transpose(0, 1)[None],
            attn_mask=_causal_mask(start, n, q_HTD.device) if start else None,
            is_causal=start == 0,
            scale=scaling,
        )
        out_THV[tokens] = o_HnV[0].transpose(0, 1)
    return out_THV


def mla_absorbed(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latent: Paged,
    kv_b_weight: Tensor,
    rows: Rows,
    *,
    scaling: float,
    v_head_dim: int,
) -> Tensor:
    """Return what mla returns, reading the latent rows directly."""
    num_heads, nope_dim = q_nope_THN.shape[1:]
    w_HXC = kv_b_weight.to(q_nope_THN.dtype).view(num_heads, nope_dim + v_head_dim, -1)
    w_k_HNC, w_v_HVC = w_HXC[:, :nope_dim], w_HXC[:, nope_dim:]
    q_c_THC = torch.einsum("thn,hnc->thc", q_nope_THN, w_k_HNC)
    q_THL = torch.cat([q_c_THC, q_rope_THR], dim=-1)
    o_THC = torch.zeros_like(q_c_THC)
    for row, start, n, tokens in rows.spans():
        if n == 0:
            continue
        latent_SL = latent.read(row, start + n).to(q_THL.dtype)
        # all heads share the rows: they are the queries of one key head
        mask = _causal_mask(start, n, q_THL.device).repeat_interleave(num_heads, dim=0) if n > 1 else None
        o_1nC = F.scaled_dot_product_attention(
            q_THL[tokens].flatten(0, 1)[None, None],
            latent_SL[None, None],
            latent_SL[None, None, :, : w_HXC.shape[2]],
            attn_mask=mask,
            scale=scaling,
        )
        o_THC[tokens] = o_1nC.view(n, num_heads, -1)
    return torch.einsum("thc,hvc->thv", o_THC, w_v_HVC)


def _causal_mask(start: int, n: int, device: torch.device) -> Tensor:
    positions_n = torch.arange(start, start + n, device=device)
    return positions_n[:, None] >= torch.arange(start + n, device=device)
