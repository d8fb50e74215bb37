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
    """weight * rms(x) * act(gate), in fp32: the output norm of a delta rule."""

    def __init__(self, size: int, *, eps: float, act: str) -> None:
        super().__init__()
        self.eps, self.act = eps, act
        self.add_parameter("weight", (size,), dtype=torch.float32)

    def forward(self, x: Tensor, gate: Tensor, ops: Ops) -> Tensor:
        """Return a tensor shaped as x."""
        y: Tensor = ops.gated_rms_norm(x, gate, self.weight, eps=self.eps, act=self.act)
        return y
