"""The logits of an output gate, from the hidden state. T tokens, H hidden, O outputs, R rank."""

from __future__ import annotations

from torch import Tensor

from firstlight.layers.context import Ops
from firstlight.layers.parameter import Module, Part


class GateProjection(Module):
    """g_proj, or g_a_proj and g_b_proj of low rank, named as if they belonged to the mixer."""

    transparent = True

    def __init__(self, hidden_size: int, width: int, rank: int | None) -> None:
        super().__init__()
        shapes = {"g_proj": (width, hidden_size)}
        if rank is not None:
            shapes = {"g_a_proj": (rank, hidden_size), "g_b_proj": (width, rank)}
        self.steps = tuple(shapes)
        for name, shape in shapes.items():
            self.add_parameter(name, shape, parts=(Part(f"{name}.weight", ()),))

    def forward(self, x_TH: Tensor, ops: Ops) -> Tensor:
        """Return the logits, [T, O]."""
        for name in self.steps:
            x_TH = ops.linear(x_TH, self.get_parameter(name), None)
        return x_TH
