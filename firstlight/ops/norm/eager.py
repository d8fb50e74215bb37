"""Norms over the last dimension, plain torch. Statistics in fp32; the equations are in ref.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _rms(x32: Tensor, eps: float) -> Tensor:
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool = False) -> Tensor:
    """Return the rms-normalised x in x.dtype; weight None leaves it unweighted."""
    normed = _rms(x.float(), eps)
    if weight is None:
        return normed.to(x.dtype)
    if plus_one:
        return (normed * (1 + weight.float())).to(x.dtype)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return the layer-normalised x in x.dtype."""
    bias32 = None if bias is None else bias.float()
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias32, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, act: str) -> Tensor:
    """Return w rms(x) act(gate) in x.dtype; act is "sigmoid" or "silu".

    Raises: ValueError on another act.
    """
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be sigmoid or silu, got {act!r}")
    gate32 = gate.float()
    activated = torch.sigmoid(gate32) if act == "sigmoid" else F.silu(gate32)
    return (weight.float() * _rms(x.float(), eps) * activated).to(x.dtype)
