"""Depthwise causal convolution with a carried window. Reference, fp32.

    y[t, c] = act( sum_{j < W} weight[c, j] x[t - W + 1 + j, c] + bias[c] )
    inputs before the row's first token come from its window; a row that starts at 0 has zeros there.

Shapes: T tokens, C channels, W width; state [S, W - 1, C]: the last W - 1 inputs, oldest first.
Source: transformers 5.23 modeling_glm5_next.py:409-447 causal_conv1d_{update,fn}.
"""

from __future__ import annotations

import torch
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
    y_TC = torch.zeros_like(x_TC, dtype=torch.float32)
    for row, start, n, tokens, export in rows.pieces():
        if n == 0:
            continue
        slot = int(state.slots_R[row])
        window = state.data[slot].float() if start > 0 else torch.zeros_like(state.data[slot], dtype=torch.float32)
        inputs = torch.cat([window, x_TC[tokens].float()])
        for t in range(n):
            seen_WC = inputs[t : t + weight_CW.shape[1]]
            y_TC[tokens][t] = (seen_WC * weight_CW.float().T).sum(0) + (0 if bias_C is None else bias_C.float())
        state.data[slot] = inputs[n:].to(state.data.dtype)
        if export is not None:
            state.data[export] = state.data[slot]
    return (y_TC if act is None else y_TC / (1 + torch.exp(-y_TC))).to(x_TC.dtype)
