"""Gated delta rule, plain torch: short rows token by token, many rows at once; longer ones in chunks (chunk.py).

The equations and letters are in ref.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.delta_rule.chunk import scan
from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows

# up to here a step per token costs less than a chunk, which is padded to 64 tokens
STEP_TOKENS = 16
# bounds the workspace of a scan of short rows, padded to a chunk each, to that of one long row
SCAN_ROWS = 8


def decay_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, *, form: str, lower_bound: float | None = None) -> Tensor:
    """Return the log decay, fp32, in the shape of z ([T, H, K] or [T, H]); form is "softplus" or "bounded".

    A_log has H values in any shape; dt_bias has H, or H K in any shape.

    Raises: ValueError on another form, or on bounded without lower_bound.
    """
    num_heads, per_head = z.shape[1], [1] * (z.dim() - 2)
    bias = dt_bias.float().reshape(num_heads, *per_head if dt_bias.numel() == num_heads else z.shape[2:])
    biased = z.float() + bias
    rate = A_log.float().exp().reshape(num_heads, *per_head)
    if form == "softplus":
        return -rate * F.softplus(biased)
    if form != "bounded" or lower_bound is None:
        raise ValueError(f"decay form must be softplus, or bounded with a lower_bound; got {form!r}, {lower_bound}")
    return lower_bound * torch.sigmoid(rate * biased)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


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
    q = q * q.shape[2] ** -0.5
    q_TJK, k_TJK = (q, k) if repeats == 1 else (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    g_TJK = g.float() if g.dim() == 3 else g.float()[..., None]
    inputs = (q_TJK, k_TJK, v_TJV.float(), g_TJK, beta_TJ.float())
    out_TJV = torch.empty_like(v_TJV, dtype=torch.float32)
    for group in rows.groups:
        x_Rn = tuple(group.take(x) for x in inputs)
        s_RJVK = state.read_group(group)
        if group.inner_export:
            cut, slot = group.inner_export
            o_RcJV, s_RJVK = _advance(s_RJVK, *(x[:, :cut] for x in x_Rn))
            state.data[slot] = s_RJVK[0].to(state.data.dtype)
            o_RmJV, s_RJVK = _advance(s_RJVK, *(x[:, cut:] for x in x_Rn))
            o_RnJV = torch.cat([o_RcJV, o_RmJV], dim=1)
        else:
            o_RnJV, s_RJVK = _advance(s_RJVK, *x_Rn)
        state.write_group(group, s_RJVK)
        group.put(out_TJV, o_RnJV)
    return out_TJV.to(q_THK.dtype)


def _advance(
    s_RJVK: Tensor, q_RnJK: Tensor, k_RnJK: Tensor, v_RnJV: Tensor, g_RnJK: Tensor, beta_RnJ: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o [R, n, J, V], states after the n tokens)."""
    inputs = (q_RnJK, k_RnJK, v_RnJV, g_RnJK, beta_RnJ)
    outputs, states = [], []
    if q_RnJK.shape[1] <= STEP_TOKENS:
        for x_R in zip(*(x.unbind(1) for x in inputs), strict=True):
            o_RJV, s_RJVK = _step(s_RJVK, *x_R)
            outputs.append(o_RJV)
        return torch.stack(outputs, dim=1), s_RJVK
    # heads are independent of each other: rows side by side are more heads
    for s_rJVK, *x_rn in zip(*(torch.split(x, SCAN_ROWS) for x in (s_RJVK, *inputs)), strict=True):
        o_nJV, s_JVK = scan(s_rJVK.flatten(0, 1), *(x.transpose(0, 1).flatten(1, 2) for x in x_rn))
        outputs.append(o_nJV.view(o_nJV.shape[0], *s_rJVK.shape[:3]).transpose(0, 1))
        states.append(s_JVK.view(s_rJVK.shape))
    return torch.cat(outputs), torch.cat(states)


def _step(
    s_RJVK: Tensor, q_RJK: Tensor, k_RJK: Tensor, v_RJV: Tensor, g_RJK: Tensor, beta_RJ: Tensor
) -> tuple[Tensor, Tensor]:
    s_RJVK = s_RJVK * g_RJK.exp()[:, :, None]
    d_RJV = beta_RJ[..., None] * (v_RJV - (s_RJVK @ k_RJK[..., None])[..., 0])
    s_RJVK = s_RJVK + d_RJV[..., None] * k_RJK[:, :, None]
    return (s_RJVK @ q_RJK[..., None])[..., 0], s_RJVK
