"""Rotary position embedding, plain torch: angles in fp32, rotation in the dtype of x."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    x_TND: Tensor, positions_T: Tensor, inv_freq_F: Tensor, *, layout: str, attention_factor: float = 1.0
) -> Tensor:
    """Return x with its first 2F dims rotated, in x.dtype.

    Raises: ValueError on another layout than "half" and "interleave".
    """
    angles_T1F = (positions_T.float()[:, None] * inv_freq_F.float())[:, None]
    cos, sin = angles_T1F.cos(), angles_T1F.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    cos, sin = cos.to(x_TND.dtype), sin.to(x_TND.dtype)
    width = 2 * inv_freq_F.shape[0]
    rotated, rest = x_TND[..., :width], x_TND[..., width:]
    if layout == "half":
        u, w = rotated.chunk(2, dim=-1)
        parts = [u * cos - w * sin, w * cos + u * sin]
    elif layout == "interleave":
        u, w = rotated[..., 0::2], rotated[..., 1::2]
        parts = [torch.stack([u * cos - w * sin, w * cos + u * sin], dim=-1).flatten(-2)]
    else:
        raise ValueError(f"layout must be half or interleave, got {layout!r}")
    return torch.cat([*parts, rest], dim=-1)
