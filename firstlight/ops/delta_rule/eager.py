"""Gated delta rule, plain torch: rows of one token in one batched step, longer rows in chunks (chunk.py).

The equations and letters are in ref.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.delta_rule.chunk import scan
from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows


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
    q_TJK = (q * q.shape[2] ** -0.5).repeat_interleave(repeats, dim=1)
    k_TJK = k.repeat_interleave(repeats, dim=1)
    g_TJK = g.float() if g.dim() == 3 else g.float()[..., None]
    inputs = (q_TJK, k_TJK, v_TJV.float(), g_TJK, beta_TJ.float())
    out_TJV = torch.zeros_like(v_TJV, dtype=torch.float32)

    spans = list(rows.spans())
    single = [(row, tokens.start) for row, _, n, tokens in spans if n == 1]
    if single:
        singles, at = [row for row, _ in single], [token for _, token in single]
        out_TJV[at], final = _step(_initial(state, rows, singles), *(x[at] for x in inputs))
        state.data[state.slots_R[singles]] = final.to(state.data.dtype)
    for row, _, n, tokens in spans:
        if n > 1:
            out_TJV[tokens], final = scan(_initial(state, rows, [row])[0], *(x[tokens] for x in inputs))
            state.data[state.slots_R[row]] = final.to(state.data.dtype)
    return out_TJV.to(q_THK.dtype)


def _initial(state: State, rows: Rows, chosen: list[int]) -> Tensor:
    """Return the states [len(chosen), J, V, K] before the step, fp32; zero where a row starts at 0."""
    states = state.data[state.slots_R[chosen]].float()
    fresh = torch.tensor([rows.starts[row] == 0 for row in chosen], device=states.device)
    # a fresh slot may hold anything, NaN included, so it is replaced, not multiplied
    return states.masked_fill(fresh[:, None, None, None], 0.0)


def _step(
    s_RJVK: Tensor, q_RJK: Tensor, k_RJK: Tensor, v_RJV: Tensor, g_RJK: Tensor, beta_RJ: Tensor
) -> tuple[Tensor, Tensor]:
    s_RJVK = s_RJVK * g_RJK.exp()[:, :, None]
    d_RJV = beta_RJ[..., None] * (v_RJV - (s_RJVK @ k_RJK[..., None])[..., 0])
    s_RJVK = s_RJVK + d_RJV[..., None] * k_RJK[:, :, None]
    return (s_RJVK @ q_RJK[..., None])[..., 0], s_RJVK
