"""Gated linear unit, and the activation of a unit without gate. Reference, fp32.

    silu       y = silu(g) u
    clamp      y = silu(min(g, limit)) clamp(u, -limit, limit)
    gelu_tanh  y = 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) u
    relu2      y = max(x, 0)^2                                           not gated

Shapes: T tokens, I intermediate size; gate_up [T, 2I], gate first; x [T, I].
Source: Shazeer 2020; transformers 5.23 modeling_glm5_next.py Glm5NextTextMLP (clamp), modeling_gemma2.py Gemma2MLP
(gelu_tanh), modeling_nemotron_h.py NemotronHMLP (relu2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def glu(gate_up_T2I: Tensor, *, kind: str, limit: float | None = None) -> Tensor:
    """Return act(gate) * up, [T, I], in the input dtype.

    Raises: ValueError on an unknown kind, or on clamp without limit.
    """
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up_T2I.dtype)
    if kind == "clamp":
        if limit is None:
            raise ValueError("glu kind clamp needs a limit")
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    elif kind != "silu":
        raise ValueError(f"glu kind must be silu, clamp or gelu_tanh, got {kind!r}")
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_T2I.dtype)


def activation(x_TI: Tensor, *, kind: str) -> Tensor:
    """Return act(x), [T, I], in the input dtype; kind is "relu2".

    Raises: ValueError on another kind.
    """
    if kind != "relu2":
        raise ValueError(f"activation kind must be relu2, got {kind!r}")
    return x_TI.float().clamp(min=0).square().to(x_TI.dtype)
