"""Gated linear unit. Reference, fp32.

    silu   y = silu(g) u
    clamp  y = silu(min(g, limit)) clamp(u, -limit, limit)

Shapes: T tokens, I intermediate size; gate_up [T, 2I], gate first.
Source: Shazeer 2020; transformers 5.23 modeling_glm5_next.py Glm5NextTextMLP (clamp).
"""

from __future__ import annotations

import torch
from torch import Tensor


def glu(gate_up_T2I: Tensor, *, kind: str, limit: float | None = None) -> Tensor:
    """Return act(gate) * up, [T, I], in the input dtype.

    Raises: ValueError on an unknown kind, or on clamp without limit.
    """
    gate, up = gate_up_T2I.float().chunk(2, dim=-1)
    if kind == "clamp":
        if limit is None:
            raise ValueError("glu kind clamp needs a limit")
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    elif kind != "silu":
        raise ValueError(f"glu kind must be silu or clamp, got {kind!r}")
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_T2I.dtype)
