"""Gated linear unit, and the activation of a unit without gate, plain torch: fp32 inside, rounded once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def glu(gate_up_T2I: Tensor, *, kind: str, limit: float | None = None) -> Tensor:
    """Return act(gate) * up, [T, I], in the input dtype.

    Raises: ValueError on an unknown kind, or on clamp without limit.
    """
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    if kind == "gelu_tanh":
        return (F.gelu(gate, approximate="tanh") * up).to(gate_up_T2I.dtype)
    if kind == "clamp":
        if limit is None:
            raise ValueError("glu kind clamp needs a limit")
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    elif kind != "silu":
        raise ValueError(f"glu kind must be silu, clamp or gelu_tanh, got {kind!r}")
    return (F.silu(gate) * up).to(gate_up_T2I.dtype)


def activation(x_TI: Tensor, *, kind: str) -> Tensor:
    """Return act(x), [T, I], in the input dtype; kind is "relu2".

    Raises: ValueError on another kind.
    """
    if kind != "relu2":
        raise ValueError(f"activation kind must be relu2, got {kind!r}")
    return F.relu(x_TI.float()).square().to(x_TI.dtype)
