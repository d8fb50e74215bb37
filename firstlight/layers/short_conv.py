"""Short convolution before a recurrence. T tokens, C channels, W width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.parameter import Module, Part


class ShortConv(Module):
    """Depthwise causal convolutions over channels side by side, stored as one [C, W] in fp32.

    channels: name -> how many, in storage order. bias: one number per channel.
    """

    transparent = True
    bias: Tensor | None

    def __init__(self, width: int, channels: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        rows, end = {}, 0
        for name, count in channels.items():
            rows[name] = slice(end, end + count)
            end += count

        def parts(attribute: str) -> tuple[Part, ...]:
            return tuple(Part(f"{name}.{attribute}", (rows[name],)) for name in channels)

        self.add_parameter("weight", (end, width), dtype=torch.float32, parts=parts("weight"))
        if bias:
            self.add_parameter("bias", (end,), dtype=torch.float32, parts=parts("bias"))
        else:
            self.bias = None

    def forward(self, x_TC: Tensor, ctx: LayerContext) -> Tensor:
        """Return silu(conv(x)), [T, C]; moves the window in the state slot on."""
        window = ctx.cache.states["conv"]
        y: Tensor = ctx.ops.short_conv(x_TC, self.weight, window, ctx.rows, bias_C=self.bias, act="silu")
        return y
