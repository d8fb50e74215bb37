"""Norms over the last dimension. Reference, fp32.

    rms    y = cast(x rsqrt(mean x^2 + eps)) w            cast to the input dtype before w
    rms1p  y = cast(x rsqrt(mean x^2 + eps) (1 + w))      cast last; w stored around 0
    layer  y = cast((x - mean) rsqrt(var + eps) w + b)
    gated  y = cast(w x rsqrt(mean x^2 + eps) act(gate))
           gate_first: y = cast(w z rsqrt(mean z^2 + eps)) with z = x act(gate)

Shapes: x [..., D]; weight, bias [D]; gate like x. Norm per group: x, gate [..., G, D], weight [G, D].
Source: transformers 5.23 modeling_llama.py LlamaRMSNorm, modeling_qwen3_next.py Qwen3NextRMSNorm,
modeling_glm5_next.py:376 Glm5NextTextRMSNormGated, modeling_nemotron_h.py:55 NemotronHRMSNormGated (gate_first).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool = False) -> Tensor:
    """Return the rms-normalised x in x.dtype; weight None leaves it unweighted."""
    x32 = x.float()
    normed = x32 / torch.sqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if plus_one:
        return (normed * (1 + weight.float())).to(x.dtype)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return the layer-normalised x in x.dtype."""
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = normed * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, act: str, gate_first: bool = False
) -> Tensor:
    """Return w rms(x) act(gate), or w rms(x act(gate)), in x.dtype; act is "sigmoid" or "silu".

    Raises: ValueError on another act.
    """
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"act must be sigmoid or silu, got {act!r}")
    x32, gate32 = x.float(), gate.float()
    sigmoid = 1 / (1 + torch.exp(-gate32))
    factor = sigmoid if act == "sigmoid" else gate32 * sigmoid
    if gate_first:
        x32, factor = x32 * factor, torch.ones_like(factor)
    normed = x32 / torch.sqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed * factor).to(x.dtype)
