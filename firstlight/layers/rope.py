"""Rotary frequencies. F = dim / 2 frequencies, one per rotated pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.parameter import Module
from firstlight.spec.norm import LinearScaling, Llama3Scaling, Rope, Yarn


class RotaryLayer(Module):
    """Rotates the first `dim` dimensions of a slice by position; holds no parameters."""

    inv_freq: Tensor

    def __init__(self, spec: Rope) -> None:
        super().__init__()
        self.layout = spec.layout
        frequencies, self.attention_factor = rotary_frequencies(spec)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x_TND: Tensor, ctx: LayerContext) -> Tensor:
        """Return x_TND with its first 2F dimensions rotated."""
        positions = ctx.rows.positions_T
        factor = self.attention_factor
        y: Tensor = ctx.ops.rope(x_TND, positions, self.inv_freq, layout=self.layout, attention_factor=factor)
        return y


def rotary_frequencies(spec: Rope) -> tuple[Tensor, float]:
    """Return (inverse frequencies fp32 [F], the factor on cos and sin)."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64, device="cpu").float() / spec.dim
    plain = 1.0 / spec.theta**exponents
    scaling = spec.scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return llama3_frequencies(plain, scaling), 1.0
    if isinstance(scaling, Yarn):
        return yarn_frequencies(spec, scaling), yarn_attention_factor(scaling)
    return plain, 1.0


def llama3_frequencies(plain_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return frequencies by the Llama 3.1 rule: wave lengths beyond the original context are stretched."""
    length = 2 * math.pi / plain_F
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    width = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((scaling.original_max_position / length - scaling.low_freq_factor) / width).clamp(0, 1)
    smooth = (1 - keep) * plain_F / scaling.factor + keep * plain_F
    return torch.where(length > low, plain_F / scaling.factor, torch.where(length < high, plain_F, smooth))


def yarn_frequencies(spec: Rope, scaling: Yarn) -> Tensor:
    """Return frequencies by YaRN: interpolated where they turn seldom, kept where they turn often, a ramp between."""

    def dimension(turns: float) -> float:
        ratio = scaling.original_max_position / (turns * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    steps = torch.arange(spec.dim // 2, dtype=torch.float32, device="cpu")
    # 0.001: keeps the ramp finite where both ends meet
    ramp = ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)
    position = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim)
    return (1.0 / (scaling.factor * position)) * ramp + (1.0 / position) * (1 - ramp)


def yarn_attention_factor(scaling: Yarn) -> float:
    """Return the factor on cos and sin: given, or from mscale and mscale_all_dim, or 0.1 ln(factor) + 1."""

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
