"""Residual topologies: how a sub-layer reads the stream and writes back.

T tokens, H hidden, N streams. `start` and `finish` bracket the layers; for each sub-layer, calling the
module reads and `write` writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.layers.context import Ops
from firstlight.layers.parameter import Module
from firstlight.spec.arch import HyperConnections, PreNorm, Residual


class PlainResidual(Module):
    """x <- x + f(x)."""

    def forward(self, x_TH: Tensor, ops: Ops) -> tuple[Tensor, Any]:
        """Return (input of the sub-layer [T, H], what `write` needs)."""
        return x_TH, None

    def write(self, x_TH: Tensor, y_TH: Tensor, carry: Any, ops: Ops) -> Tensor:
        """Return the stream after the sub-layer put out y."""
        return x_TH + y_TH


class HyperConnection(Module):
    """N streams: read sum_i pre_i X_i, write post (outer) y + comb^T X. All weights fp32."""

    def __init__(self, hidden_size: int, spec: HyperConnections) -> None:
        super().__init__()
        self.spec = spec
        n = spec.mult
        self.add_parameter("fn", ((2 + n) * n, n * hidden_size))
        self.add_parameter("base", ((2 + n) * n,), dtype=torch.float32)
        self.add_parameter("scale", (3,), dtype=torch.float32)

    def forward(self, x_TNH: Tensor, ops: Ops) -> tuple[Tensor, Any]:
        """Return (input of the sub-layer [T, H], (post [T, N], comb [T, N, N]))."""
        spec = self.spec
        numbers = {"sinkhorn_iters": spec.sinkhorn_iters, "eps": spec.eps, "norm_eps": spec.norm_eps}
        h_TH, post_TN, comb_TNN = ops.hyper_read(x_TNH, self.fn, self.base, self.scale, **numbers)
        return h_TH, (post_TN, comb_TNN)

    def write(self, x_TNH: Tensor, y_TH: Tensor, carry: Any, ops: Ops) -> Tensor:
        """Return the streams after the sub-layer put out y."""
        out: Tensor = ops.hyper_write(x_TNH, y_TH, *carry)
        return out


def build_residual(hidden_size: int, spec: Residual) -> PlainResidual | HyperConnection:
    """Return the module of one sub-layer's residual. Raises: NotImplementedError for a noun without a layer."""
    if isinstance(spec, PreNorm):
        return PlainResidual()
    if isinstance(spec, HyperConnections):
        return HyperConnection(hidden_size, spec)
    raise NotImplementedError(f"no layer computes {type(spec).__name__}")


def start(x_TH: Tensor, spec: Residual) -> Tensor:
    """Return the stream(s) that the embedding starts: itself, or N copies [T, N, H]."""
    if isinstance(spec, HyperConnections):
        return x_TH.unsqueeze(1).expand(-1, spec.mult, -1)
    return x_TH


def finish(x: Tensor, spec: Residual, ops: Ops) -> Tensor:
    """Return the one stream [T, H] that the final norm reads."""
    if isinstance(spec, HyperConnections):
        out: Tensor = ops.hyper_head(x)
        return out
    return x
