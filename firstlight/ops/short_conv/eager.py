"""Depthwise causal convolution, plain torch: all rows in one buffer, W multiply-adds. Letters as in ref.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.paged.cache import State
from firstlight.ops.rows import Rows


def short_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    state: State,
    rows: Rows,
    *,
    bias_C: Tensor | None = None,
    act: str | None = "silu",
) -> Tensor:
    """Return the convolution [T, C] in x.dtype and leave each row's window in its slot; an empty row keeps its own.

    Raises: ValueError if act is neither "silu" nor None.
    """
    if act not in ("silu", None):
        raise ValueError(f"act must be silu or None, got {act!r}")
    history = weight_CW.shape[1] - 1
    num_tokens, num_rows = x_TC.shape[0], len(rows.lengths)
    # the buffer holds, row by row, the window and then the tokens
    position_T = torch.arange(num_tokens, device=x_TC.device) + (rows.row_T + 1) * history
    begin_R = rows.offsets[:-1].long() + torch.arange(num_rows, device=x_TC.device) * history
    reach_h = torch.arange(history, device=x_TC.device)
    buffer = torch.zeros(num_tokens + num_rows * history, x_TC.shape[1], device=x_TC.device)
    buffer[position_T] = x_TC.float()
    resumed = torch.tensor(
        [row for row, start in enumerate(rows.starts) if start > 0], dtype=torch.int64, device=x_TC.device
    )
    buffer[begin_R[resumed, None] + reach_h] = state.data[state.slots_R[resumed]].float()

    weight_WC = weight_CW.float().transpose(0, 1)
    num_windows = max(0, buffer.shape[0] - history)
    y = torch.zeros_like(buffer[:num_windows]) if bias_C is None else bias_C.float().expand(num_windows, -1)
    for tap in range(history + 1):
        y = torch.addcmul(y, buffer[tap : tap + num_windows], weight_WC[tap])
    y_TC = y[position_T - history]

    written = torch.tensor([row for row, n in enumerate(rows.lengths) if n > 0], dtype=torch.int64, device=x_TC.device)
    last = rows.offsets[1:].long() + torch.arange(num_rows, device=x_TC.device) * history
    state.data[state.slots_R[written]] = buffer[last[written, None] + reach_h].to(state.data.dtype)
    return (y_TC if act is None else F.silu(y_TC)).to(x_TC.dtype)
