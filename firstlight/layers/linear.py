"""Projections. T tokens, H hidden, O outputs, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.layers.context import Ops
from firstlight.layers.parameter import Module, Part


class Linear(Module):
    """y_TO = x_TH weight^T (+ bias)."""

    bias: Tensor | None

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.add_parameter("weight", (num_outputs, num_inputs))
        if bias:
            self.add_parameter("bias", (num_outputs,))
        else:
            self.bias = None

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Return [..., O]."""
        y: Tensor = ops.linear(x, self.weight, self.bias)
        return y


class MergedLinear(Module):
    """Several projections of one input, stored and computed as one matrix.

    outputs: name -> width, in storage order; biased: the names that carry a bias.
    """

    transparent = True
    bias: Tensor | None

    def __init__(self, num_inputs: int, outputs: Mapping[str, int], *, biased: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.widths = tuple(outputs.values())
        rows, begin = {}, 0
        for name, width in outputs.items():
            rows[name] = slice(begin, begin + width)
            begin += width
        weights = tuple(Part(f"{name}.weight", (rows[name],)) for name in outputs)
        self.add_parameter("weight", (begin, num_inputs), parts=weights)
        if biased and set(biased) != set(outputs):
            raise ValueError(f"all of {', '.join(outputs)} or none may carry a bias, not {', '.join(biased)}")
        if biased:
            self.add_parameter("bias", (begin,), parts=tuple(Part(f"{name}.bias", (rows[name],)) for name in outputs))
        else:
            self.bias = None

    def forward(self, x: Tensor, ops: Ops) -> tuple[Tensor, ...]:
        """Return one [..., O] per output, in storage order: views of one result."""
        y: Tensor = ops.linear(x, self.weight, self.bias)
        return torch.split(y, list(self.widths), dim=-1)


class Embedding(Module):
    """Token embedding, [V, H]; also the head where the two are tied."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.add_parameter("weight", (vocab_size, hidden_size))

    def forward(self, ids_T: Tensor, ops: Ops) -> Tensor:
        """Return x_TH."""
        x: Tensor = ops.embedding(ids_T, self.weight)
        return x
