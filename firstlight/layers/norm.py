"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import Ops
from firstlight.layers.parameter import Module
from firstlight.spec.norm import Norm


class NormLayer(Module):
    """rms, rms1p or layer norm, as its spec says."""

    def __init__(self, size: int, spec: Norm) -> None:
        super().__init__()
        self.spec = spec
        self.add_parameter("weight", (size,))
        if spec.kind == "layer":
            self.add_parameter("bias", (size,))

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """Return a tensor shaped as x."""
        if self.spec.kind == "layer":
            y: Tensor = ops.layer_norm(x, self.weight, self.bias, eps=self.spec.eps)
        else:
            y = ops.rms_norm(x, self.weight, eps=self.spec.eps, plus_one=self.spec.kind == "rms1p")
        return y


class GatedNorm(Module):
    """weight * rms(x) * act(gate), in fp32: the output norm of a recurrence.

    groups: equal parts of the last dimension, each with an rms of its own. gate_first: weight * rms(x * act(gate)).
    """

    weight: Tensor

    def __init__(self, size: int, *, eps: float, act: str, groups: int = 1, gate_first: bool = False) -> None:
        super().__init__()
        self.eps, self.act, self.groups, self.gate_first = eps, act, groups, gate_first
        self.add_parameter("weight", (size,), dtype=torch.float32)

    def forward(self, x: Tensor, gate: Tensor, ops: Ops) -> Tensor:
        """Return a tensor shaped as x."""
        parts = (self.groups, self.weight.shape[0] // self.groups)
        x, gate, weight = (t.view(*t.shape[:-1], *parts) for t in (x, gate, self.weight))
        y: Tensor = ops.gated_rms_norm(x, gate, weight, eps=self.eps, act=self.act, gate_first=self.gate_first)
        return y.flatten(-2)
