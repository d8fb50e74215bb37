"""State-space recurrence of Mamba-2. Reference, fp32, one token after the other.

    dt = max(softplus(z + dt_bias), dt_min) ; A = -exp(A_log)
    S <- exp(dt A) S + (dt x) B^T ; y = S C + D x                      read after the write

Shapes: T tokens, H heads, P head dim, G groups (each serves H / G consecutive heads), N state size; x [T, H, P],
z [T, H], B, C [T, G, N]; A_log, dt_bias, D [H]; state [S, H, P, N] fp32.
Source: Dao, Gu 2024 (arXiv 2405.21060), equation 2; transformers 5.23 modeling_nemotron_h.py:205-320, which clamps dt
from below in a prefill and not in a decode step; here it is clamped everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows


def mamba2(
    x_THP: Tensor,
    z_TH: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    D_H: Tensor,
    state: State,
    rows: Rows,
    *,
    dt_min: float = 0.0,
) -> Tensor:
    """Return y [T, H, P] in x.dtype and leave each row's state in its slot; an empty row keeps its own."""
    x, biased_TH = x_THP.float(), z_TH.float() + dt_bias_H.float()
    dt_TH = torch.logaddexp(biased_TH, torch.zeros_like(biased_TH)).clamp(min=dt_min)
    decay_TH = torch.exp(-dt_TH * torch.exp(A_log_H.float()))
    heads = x.shape[1] // B_TGN.shape[1]
    B_THN, C_THN = (y.float().repeat_interleave(heads, dim=1) for y in (B_TGN, C_TGN))
    y_THP = torch.zeros_like(x)
    for row, start, n, tokens, export in rows.pieces():
        slot = int(state.slots_R[row])
        s_HPN = state.data[slot].float() if start > 0 else torch.zeros_like(state.data[slot], dtype=torch.float32)
        for t in range(tokens.start, tokens.stop):
            written_HPN = (dt_TH[t, :, None] * x[t])[..., None] * B_THN[t][:, None]
            s_HPN = decay_TH[t][:, None, None] * s_HPN + written_HPN
            y_THP[t] = torch.einsum("hpn,hn->hp", s_HPN, C_THN[t]) + D_H.float()[:, None] * x[t]
        if n:
            state.data[slot] = s_HPN.to(state.data.dtype)
        if export is not None:
            state.data[export] = state.data[slot]
    return y_THP.to(x_THP.dtype)
