"""Gated linear unit, plain torch: fp32 inside, rounded once."""

from __future__ import annotations

import torch.nn.functional as F
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
    return (F.silu(gate) * up).to(gate_up_T2I.dtype)
