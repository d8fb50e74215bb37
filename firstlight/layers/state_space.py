"""State space (Mamba-2) behind a short convolution.

T tokens, H hidden, J heads, P head dim, G groups, N state size, C convolution channels: x, B and C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.linear import Linear
from firstlight.layers.norm import GatedNorm
from firstlight.layers.parameter import Module
from firstlight.layers.short_conv import ShortConv
from firstlight.spec.mixers import Mamba2


class StateSpace(Module):
    """S <- exp(dt A) S + (dt x) B^T, read after the write; norm of the gated output per group; output projection.

    Differs from the delta rule: no correction by what the state holds; one input projection; the gate is inside the
    norm.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, hidden_size: int, spec: Mamba2) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = Linear(hidden_size, spec.value_dim + spec.conv_dim + spec.num_heads)
        self.conv = ShortConv(spec.conv_kernel_size, {"conv1d": spec.conv_dim}, bias=spec.conv_bias)
        for name in ("A_log", "D", "dt_bias"):
            self.add_parameter(name, (spec.num_heads,), dtype=torch.float32)
        self.o_norm = GatedNorm(spec.value_dim, eps=spec.norm_eps, act="silu", groups=spec.num_groups, gate_first=True)
        self.o_proj = Linear(spec.value_dim, hidden_size)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH; reads and writes the state and window slots of the rows."""
        spec, ops = self.spec, ctx.ops
        gate, xBC_TC, dt_TJ = self.in_proj(x_TH, ops).split((spec.value_dim, spec.conv_dim, spec.num_heads), dim=-1)
        shared = spec.num_groups * spec.state_size
        x, B, C = self.conv(xBC_TC, ctx).split((spec.value_dim, shared, shared), dim=-1)
        y_TJP = ops.mamba2(
            x.unflatten(-1, (spec.num_heads, spec.head_dim)),
            dt_TJ,
            B.unflatten(-1, (spec.num_groups, spec.state_size)),
            C.unflatten(-1, (spec.num_groups, spec.state_size)),
            self.A_log,
            self.dt_bias,
            self.D,
            ctx.cache.states["recurrent"],
            ctx.rows,
            dt_min=spec.dt_min,
        )
        out: Tensor = self.o_proj(self.o_norm(y_TJP.flatten(1), gate, ops), ops)
        return out
