"""Gates. Reference, fp32.

    output  y = cast(x act(gate))             sigmoid(g) = 1 / (1 + exp(-g)) ; silu(g) = g sigmoid(g)
    shared  y = cast(e sigmoid(w . x))

Shapes: x, gate [..., D]; T tokens, H hidden; e, x [T, H]; w [1, H].
Source: transformers 5.23 modeling_qwen3_next.py Qwen3NextAttention.forward, Qwen3NextSparseMoeBlock.forward.
"""

from __future__ import annotations

import torch
from torch import Tensor


def output_gate(x: Tensor, gate: Tensor, *, act: str) -> Tensor:
    """Return x act(gate) in x.dtype; act is "sigmoid" or "silu".

    Raises: ValueError on another act.
    """
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be sigmoid or silu, got {act!r}")
    gate32 = gate.float()
    sigmoid = 1 / (1 + torch.exp(-gate32))
    return (x.float() * (sigmoid if act == "sigmoid" else gate32 * sigmoid)).to(x.dtype)


def shared_gate(e_TH: Tensor, x_TH: Tensor, weight_1H: Tensor) -> Tensor:
    """Return e sigmoid(w . x), [T, H], in e.dtype."""
    logit_T1 = (x_TH.float() * weight_1H.float()).sum(-1, keepdim=True)
    return (e_TH.float() / (1 + torch.exp(-logit_T1))).to(e_TH.dtype)
