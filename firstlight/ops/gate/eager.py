"""Gates, plain torch: fp32 inside, rounded once. Letters as in ref.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def output_gate(x: Tensor, gate: Tensor, *, act: str) -> Tensor:
    """Return x act(gate) in x.dtype; act is "sigmoid" or "silu".

    Raises: ValueError on another act.
    """
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be sigmoid or silu, got {act!r}")
    gate32 = gate.float()
    return (x.float() * (torch.sigmoid(gate32) if act == "sigmoid" else F.silu(gate32))).to(x.dtype)


def shared_gate(e_TH: Tensor, x_TH: Tensor, weight_1H: Tensor) -> Tensor:
    """Return e sigmoid(w . x), [T, H], in e.dtype."""
    logit_T1 = F.linear(x_TH.float(), weight_1H.float())
    return (e_TH.float() * torch.sigmoid(logit_T1)).to(e_TH.dtype)
