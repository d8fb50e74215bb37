"""Norms over the last dimension, plain torch. Statistics in fp32; the equations are in ref.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _rms(x32: Tensor, weight32: Tensor | None, eps: float) -> Tensor:
    if weight32 is not None and weight32.dim() > 1:
        return F.rms_norm(x32, (x32.shape[-1],), None, eps) * weight32
    return F.rms_norm(x32, (x32.shape[-1],), weight32, eps)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool = False) -> Tensor:
    """Return the rms-normalised x in x.dtype; weight None leaves it unweighted."""
    if plus_one and weight is not None:
        return _rms(x.float(), 1 + weight.float(), eps).to(x.dtype)
    if weight is None or x.dtype == weight.dtype == torch.float32:
        return _rms(x.float(), weight, eps).to(x.dtype)
    # rounded before the weight
    return (_rms(x.float(), None, eps).to(x.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return the layer-normalised x in x.dtype."""
    bias32 = None if bias is None else bias.float()
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias32, eps).to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, act: str, gate_first: bool = False
) -> Tensor:
    """Return w rms(x) act(gate), or w rms(x act(gate)), in x.dtype; act is "sigmoid" or "silu".

    Raises: ValueError on another act.
    """
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be sigmoid or silu, got {act!r}")
    gate32 = gate.float()
    factor = torch.sigmoid(gate32) if act == "sigmoid" else F.silu(gate32)
    if gate_first:
        return _rms(x.float() * factor, weight.float(), eps).to(x.dtype)
    return (_rms(x.float(), weight.float(), eps) * factor).to(x.dtype)
