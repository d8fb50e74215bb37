"""Rotary position embedding. Reference, fp32.

    a = pos inv_freq[j] ; (x_u, x_w) <- m (x_u cos a - x_w sin a, x_w cos a + x_u sin a)
    half: (u, w) = (j, j + F)      interleave: (u, w) = (2j, 2j + 1)      m = attention_factor

Written where it was read, so the layout of the head does not change. Dims from 2F on pass through.

Shapes: T tokens, N heads, D head dim, F frequencies, 2F <= D.
Source: RoFormer (Su et al. 2021) eq. 34; transformers 5.23 modeling_llama.py apply_rotary_pos_emb (half),
modeling_deepseek_v32.py:296 (interleave; transformers writes the pairs de-interleaved).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    x_TND: Tensor, positions_T: Tensor, inv_freq_F: Tensor, *, layout: str, attention_factor: float = 1.0
) -> Tensor:
    """Return x with its first 2F dims rotated, in x.dtype.

    Raises: ValueError on another layout than "half" and "interleave".
    """
    if layout not in ("half", "interleave"):
        raise ValueError(f"layout must be half or interleave, got {layout!r}")
    num_freqs = inv_freq_F.shape[0]
    out = x_TND.float().clone()
    for j in range(num_freqs):
        u, w = (j, j + num_freqs) if layout == "half" else (2 * j, 2 * j + 1)
        angle_T1 = (positions_T.float() * inv_freq_F[j].float())[:, None]
        cos, sin = torch.cos(angle_T1) * attention_factor, torch.sin(angle_T1) * attention_factor
        x_u, x_w = x_TND[..., u].float(), x_TND[..., w].float()
        out[..., u] = x_u * cos - x_w * sin
        out[..., w] = x_w * cos + x_u * sin
    return out.to(x_TND.dtype)
