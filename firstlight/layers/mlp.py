"""Gated feed-forward. T tokens, H hidden, I intermediate."""

from __future__ import annotations

from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.parameter import Module
from firstlight.spec.feedforward import GLU


class GatedMLP(Module):
    """down(act(gate x, up x))."""

    def __init__(self, hidden_size: int, spec: GLU) -> None:
        super().__init__()
        self.spec = spec
        width = spec.intermediate_size
        biased = ("gate_proj", "up_proj") if spec.bias else ()
        self.gate_up = MergedLinear(hidden_size, {"gate_proj": width, "up_proj": width}, biased=biased)
        self.down_proj = Linear(width, hidden_size, bias=spec.bias)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH."""
        gate_up_T2I = ctx.ops.linear(x_TH, self.gate_up.weight, self.gate_up.bias)
        hidden_TI = ctx.ops.glu(gate_up_T2I, kind=self.spec.act.kind, limit=self.spec.act.limit)
        out: Tensor = self.down_proj(hidden_TI, ctx.ops)
        return out
