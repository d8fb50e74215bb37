"""Dense projection and embedding, plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T (+ bias) in x.dtype; a weight of another dtype is cast to it."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def embedding(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the rows of the table, [T, H], in the table's dtype."""
    return F.embedding(ids_T, weight_VH)
