"""Gated delta rule and its log decay. Reference, fp32, one token after the other.

    softplus  g = -exp(A_log) softplus(z + dt_bias)
    bounded   g = lower_bound sigmoid(exp(A_log) (z + dt_bias))
    q = K^-1/2 n(q) ; k = n(k) ; n(x) = x / sqrt(sum x^2 + 1e-6)
    S <- S Diag(exp g) ; S <- S + beta (v - S k) k^T ; o = S q         read after the write

Shapes: T tokens, H key heads, J value heads (each key head serves J / H consecutive ones), K key dim, V value dim;
g [T, J, K] (per channel, KDA) or [T, J] (per head, gated DeltaNet); state [S, J, V, K] fp32.
Source: transformers 5.23 modeling_glm5_next.py:463 recurrent_kimi_delta_attention and :339 Glm5NextTextForgetGate,
modeling_qwen3_next.py:512 torch_recurrent_gated_delta_rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows


def decay_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, form: str, lower_bound: float | None = None) -> Tensor:
    """Return the log decay, fp32, in the shape of z ([T, H, K] or [T, H]); form is "softplus" or "bounded".

    A_log has H values in any shape; dt_bias has H, or H K in any shape.

    Raises: ValueError on another form, or on bounded without lower_bound.
    """
    num_heads = z.shape[1]
    bias_HX = dt_bias.float().reshape(num_heads, -1)
    biased = z.float() + (bias_HX if z.dim() == 3 else bias_HX[:, 0])
    rate = torch.exp(A_log.float()).reshape(num_heads, *[1] * (z.dim() - 2))
    if form == "softplus":
        return -rate * torch.logaddexp(biased, torch.zeros_like(biased))
    if form != "bounded" or lower_bound is None:
        raise ValueError(f"decay form must be softplus, or bounded with a lower_bound; got {form!r}, {lower_bound}")
    return lower_bound * torch.sigmoid(rate * biased)


def _l2norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TJV: Tensor,
    g: Tensor,
    beta_TJ: Tensor,
    state: State,
    rows: Rows,
    *,
    qk_l2norm: bool = True,
) -> Tensor:
    """Return o [T, J, V] in q.dtype and leave each row's state in its slot; an empty row keeps its own."""
    q, k = q_THK.float(), k_THK.float()
    if qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    repeats = v_TJV.shape[1] // q.shape[1]
    q = (q * q.shape[2] ** -0.5).repeat_interleave(repeats, dim=1)
    k = k.repeat_interleave(repeats, dim=1)
    g_TJK = g.float() if g.dim() == 3 else g.float()[..., None]
    out_TJV = torch.zeros_like(v_TJV, dtype=torch.float32)
    for row, start, n, tokens, export in rows.pieces():
        slot = int(state.slots_R[row])
        s_JVK = state.data[slot].float() if start > 0 else torch.zeros_like(state.data[slot], dtype=torch.float32)
        for t in range(tokens.start, tokens.stop):
            s_JVK = s_JVK * torch.exp(g_TJK[t])[:, None]
            error_JV = v_TJV[t].float() - torch.einsum("jvk,jk->jv", s_JVK, k[t])
            s_JVK = s_JVK + (beta_TJ[t].float()[:, None] * error_JV)[..., None] * k[t][:, None]
            out_TJV[t] = torch.einsum("jvk,jk->jv", s_JVK, q[t])
        if n:
            state.data[slot] = s_JVK.to(state.data.dtype)
        if export is not None:
            state.data[export] = state.data[slot]
    return out_TJV.to(q_THK.dtype)
