"""Multi-head latent attention, plain torch: expanded, and absorbed.

Expanded: keys and values of every cached token are computed, cheap per query, so for rows of many tokens.
Absorbed: W moves onto the query and the output, which attend to the latent rows themselves, for short rows.
Letters as in ref.py; behind THR: R rows of n tokens, t = R n, r rope dim, L = C + r.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.groups import Group
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
    """Return the attention output [T, H, V] in q.dtype; the latent rows of this step are already in the cache.

    Rows of one token are absorbed, longer ones expanded.
    """
    return _attend(q_nope_THN, q_rope_THR, latent, kv_b_weight, rows, scaling, v_head_dim, longest_absorbed=1)


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
    """Return what mla returns, every row absorbed."""
    longest = max(rows.lengths, default=0)
    return _attend(q_nope_THN, q_rope_THR, latent, kv_b_weight, rows, scaling, v_head_dim, longest_absorbed=longest)


def _attend(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latent: Paged,
    kv_b_weight: Tensor,
    rows: Rows,
    scaling: float,
    v_head_dim: int,
    *,
    longest_absorbed: int,
) -> Tensor:
    num_tokens, num_heads, nope_dim = q_nope_THN.shape
    w_HXC = kv_b_weight.to(q_nope_THN.dtype).view(num_heads, nope_dim + v_head_dim, -1)
    q_THD = torch.cat([q_nope_THN, q_rope_THR], dim=-1)
    out_THV = q_nope_THN.new_zeros(num_tokens, num_heads, v_head_dim)
    for group in rows.groups:
        latent_RSL = latent.read_group(group, q_THD.dtype)
        body = _absorbed if group.n <= longest_absorbed else _expanded
        group.put(out_THV, body(group.take(q_THD), latent_RSL, w_HXC, group, scaling, nope_dim))
    return out_THV


def _expanded(q_RnHD: Tensor, latent_RSL: Tensor, w_HXC: Tensor, group: Group, scaling: float, nope_dim: int) -> Tensor:
    """Return o [R, n, H, V]."""
    num_heads, _, latent_dim = w_HXC.shape
    c_RSC, k_rope_RSr = latent_RSL[..., :latent_dim], latent_RSL[..., latent_dim:]
    kv_RSHX = F.linear(c_RSC, w_HXC.flatten(0, 1)).view(*c_RSC.shape[:2], *w_HXC.shape[:2])
    k_rope_RSHr = k_rope_RSr[:, :, None].expand(-1, -1, num_heads, -1)
    k_RSHD = torch.cat([kv_RSHX[..., :nope_dim], k_rope_RSHr], dim=-1)
    o_RHnV = F.scaled_dot_product_attention(
        q_RnHD.transpose(1, 2),
        k_RSHD.transpose(1, 2),
        kv_RSHX[..., nope_dim:].transpose(1, 2),
        attn_mask=None if group.plain else group.visible()[:, None],
        is_causal=group.plain,
        scale=scaling,
    )
    return o_RHnV.transpose(1, 2)


def _absorbed(q_RnHD: Tensor, latent_RSL: Tensor, w_HXC: Tensor, group: Group, scaling: float, nope_dim: int) -> Tensor:
    """Return o [R, n, H, V]."""
    shape, latent_dim = q_RnHD.shape[:3], w_HXC.shape[2]
    q_c_HtC = q_RnHD[..., :nope_dim].flatten(0, 1).transpose(0, 1) @ w_HXC[:, :nope_dim]
    q_RnHL = torch.cat([q_c_HtC.transpose(0, 1).view(*shape, latent_dim), q_RnHD[..., nope_dim:]], dim=-1)
    # all heads share the latent rows: tokens and heads are the queries of one key head
    if group.n == 1:
        mask = group.visible()[:, None] if group.ragged else None
    else:
        mask = group.visible()[:, None].repeat_interleave(shape[2], dim=2)
    o_R1qC = F.scaled_dot_product_attention(
        q_RnHL.flatten(1, 2)[:, None],
        latent_RSL[:, None],
        latent_RSL[:, None, :, :latent_dim],
        attn_mask=mask,
        scale=scaling,
    )
    o_HtC = o_R1qC.reshape(-1, shape[2], latent_dim).transpose(0, 1)
    o_HtV = o_HtC @ w_HXC[:, nope_dim:].mT
    return o_HtV.transpose(0, 1).view(*shape, o_HtV.shape[2])
