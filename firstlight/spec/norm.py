"""Normalisation and rotary positions as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from firstlight.spec.choices import check_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Normalisation over the last dimension.

    rms: w * x / rms(x). rms1p: (1 + w) * x / rms(x), the sum in fp32. layer: LayerNorm with weight and bias.
    """

    eps: float
    kind: Literal["rms", "rms1p", "layer"] = "rms"

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN frequency scaling (arXiv 2309.00071): ramp between interpolated and original frequencies."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """The Llama 3.1 rule: low frequencies divided by factor, high ones kept, a smooth band between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `dim` dimensions of a slice.

    half: pairs are (j, j + dim/2). interleave: pairs are (2j, 2j + 1).
    """

    theta: float
    dim: int
    layout: Literal["half", "interleave"] = "half"
    scaling: Yarn | Llama3Scaling | LinearScaling | None = None

    def __post_init__(self) -> None:
        check_choices(self)


def softmax_scale(qk_head_dim: int, rope: Rope | None) -> float:
    """Return 1/sqrt(d), times mscale^2 where YaRN asks for it (`mscale_all_dim`)."""
    scaling = qk_head_dim**-0.5
    yarn = rope.scaling if rope else None
    if isinstance(yarn, Yarn) and yarn.mscale_all_dim and yarn.factor > 1:
        mscale = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0
        scaling *= mscale * mscale
    return float(scaling)
