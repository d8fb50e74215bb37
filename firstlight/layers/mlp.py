"""Feed-forward of one unit, gated or not. T tokens, H hidden, I intermediate."""

from __future__ import annotations

from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.parameter import Module
from firstlight.spec.feedforward import GLU


class GatedMLP(Module):
    """down(act(gate x, up x)); down(act(up x)) where the activation is not gated."""

    def __init__(self, hidden_size: int, spec: GLU) -> None:
        super().__init__()
        self.spec = spec
        names = ("gate_proj", "up_proj") if spec.act.gated else ("up_proj",)
        biased = names if spec.bias else ()
        self.gate_up = MergedLinear(hidden_size, dict.fromkeys(names, spec.intermediate_size), biased=biased)
        self.down_proj = Linear(spec.intermediate_size, hidden_size, bias=spec.bias)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH."""
        act, ops = self.spec.act, ctx.ops
        gate_up = ops.linear(x_TH, self.gate_up.weight, self.gate_up.bias)
        if act.gated:
            hidden_TI = ops.glu(gate_up, kind=act.kind, limit=act.limit)
        else:
            hidden_TI = ops.activation(gate_up, kind=act.kind)
        out: Tensor = self.down_proj(hidden_TI, ops)
        return out
