"""Dense projection and embedding. Reference, fp32.

    linear     y[..., o] = sum_i x[..., i] W[o, i] + b[o]
    embedding  y[t] = W[ids[t]]

Shapes: x [..., I]; weight [O, I]; bias [O]; ids [T]; table [V, H].
Source: definition.
"""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T (+ bias), computed in fp32, in x.dtype."""
    y = x.float() @ weight.float().transpose(0, 1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def embedding(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the rows of the table, [T, H], in the table's dtype."""
    return weight_VH[ids_T.long()]
