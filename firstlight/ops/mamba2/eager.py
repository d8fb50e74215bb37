"""State-space recurrence of Mamba-2, plain torch: short rows token by token, many rows at once; longer ones in chunks.

The equations and letters are in ref.py, the chunked form in README.md. c tokens of a chunk, U heads of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows

# up to here a step per token costs less than a chunk
STEP_TOKENS = 16
CHUNK = 64


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
    x, groups = x_THP.float(), B_TGN.shape[1]
    per_group = x.shape[1] // groups
    dt_TH = F.softplus(z_TH.float() + dt_bias_H.float()).clamp(min=dt_min)
    log_TH = -dt_TH * A_log_H.float().exp()
    # heads by group: [G, U]
    inputs = (
        (dt_TH[..., None] * x).view(-1, groups, per_group, x.shape[2]),
        log_TH.view(-1, groups, per_group),
        B_TGN.float(),
        C_TGN.float(),
    )
    y_THP = torch.empty_like(x)
    for group in rows.groups:
        x_Rn = tuple(group.take(tensor) for tensor in inputs)
        s_RHPN = state.read_group(group)
        s_RGUPN = s_RHPN.view(-1, groups, per_group, *s_RHPN.shape[2:])
        pieces = []
        if group.inner_export:
            cut, slot = group.inner_export
            y, s_RGUPN = _advance(s_RGUPN, [tensor[:, :cut] for tensor in x_Rn])
            state.data[slot] = s_RGUPN[0].flatten(0, 1).to(state.data.dtype)
            pieces, x_Rn = [y], tuple(tensor[:, cut:] for tensor in x_Rn)
        y, s_RGUPN = _advance(s_RGUPN, x_Rn)
        state.write_group(group, s_RGUPN.flatten(1, 2))
        group.put(y_THP, torch.cat([*pieces, y], dim=1).flatten(2, 3))
    return (y_THP + D_H.float()[:, None] * x).to(x_THP.dtype)


def _advance(s_RGUPN: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (y [R, n, G, U, P] without the skip, states after the n tokens)."""
    n = inputs[0].shape[1]
    outputs = []
    for begin in range(0, n, CHUNK):
        piece = [tensor[:, begin : begin + CHUNK] for tensor in inputs]
        y, s_RGUPN = (_steps if n <= STEP_TOKENS else _chunk)(s_RGUPN, *piece)
        outputs.append(y)
    return torch.cat(outputs, dim=1), s_RGUPN


def _steps(s_RGUPN: Tensor, x_RnGUP: Tensor, log_RnGU: Tensor, B_RnGN: Tensor, C_RnGN: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for x, log, B, C in zip(*(tensor.unbind(1) for tensor in (x_RnGUP, log_RnGU, B_RnGN, C_RnGN)), strict=True):
        s_RGUPN = log.exp()[..., None, None] * s_RGUPN + x[..., None] * B[:, :, None, None]
        outputs.append((s_RGUPN @ C[:, :, None, :, None])[..., 0])
    return torch.stack(outputs, dim=1), s_RGUPN


def _chunk(s_RGUPN: Tensor, x_RcGUP: Tensor, log_RcGU: Tensor, B_RcGN: Tensor, C_RcGN: Tensor) -> tuple[Tensor, Tensor]:
    sum_RGUc = log_RcGU.cumsum(1).permute(0, 2, 3, 1)
    x_RGUcP = x_RcGUP.permute(0, 2, 3, 1, 4)
    B_RGcN, C_RGcN = B_RcGN.transpose(1, 2), C_RcGN.transpose(1, 2)
    # exponents are never positive where i >= j
    count = x_RcGUP.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=x_RcGUP.device).triu(1)
    between = (sum_RGUc[..., :, None] - sum_RGUc[..., None, :]).masked_fill(later, float("-inf")).exp()
    y_RGUcP = ((C_RGcN @ B_RGcN.mT)[:, :, None] * between) @ x_RGUcP
    carried = C_RGcN[:, :, None] @ s_RGUPN.mT
    y_RGUcP = y_RGUcP + sum_RGUc.exp()[..., None] * carried
    left_RGUc = (sum_RGUc[..., -1:] - sum_RGUc).exp()
    written = (left_RGUc[..., None] * x_RGUcP).mT @ B_RGcN[:, :, None]
    return y_RGUcP.permute(0, 3, 1, 2, 4), sum_RGUc[..., -1, None, None].exp() * s_RGUPN + written
