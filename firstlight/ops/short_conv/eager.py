"""Depthwise causal convolution, plain torch: W multiply-adds per group of rows. Letters as in ref.py.

R rows of n tokens.
"""

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
    weight_WC = weight_CW.float().transpose(0, 1).contiguous()
    y_TC = torch.empty_like(x_TC, dtype=torch.float32)
    for group in rows.groups:
        # the window, then the tokens
        inputs_RxC = torch.cat([state.read_group(group), group.take(x_TC).float()], dim=1)
        y_RnC = inputs_RxC[:, : group.n] * weight_WC[0]
        for tap in range(1, weight_WC.shape[0]):
            y_RnC = torch.addcmul(y_RnC, inputs_RxC[:, tap : tap + group.n], weight_WC[tap])
        group.put(y_TC, y_RnC)
        state.write_group(group, inputs_RxC[:, group.n :])
        if group.inner_export:
            cut, slot = group.inner_export
            state.data[slot] = inputs_RxC[0, cut : cut + weight_WC.shape[0] - 1].to(state.data.dtype)
    if bias_C is not None:
        y_TC = y_TC + bias_C.float()
    return (y_TC if act is None else F.silu(y_TC)).to(x_TC.dtype)
