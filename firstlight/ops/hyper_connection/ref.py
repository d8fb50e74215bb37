"""Manifold-constrained hyper-connections: several residual streams. Reference, fp32.

    f = rms(flatten X), unweighted ; [a, b, C] = fn f ; [base_a, base_b, base_C] = base
    pre = sigmoid(a s0 + base_a) + eps ; post = 2 sigmoid(b s1 + base_b)
    comb = softmax_rows(C s2 + base_C) + eps ; comb /= colsum + eps
    then (iters - 1) times: comb /= rowsum + eps ; comb /= colsum + eps
    read  h = sum_i pre_i X_i        write  X <- post (outer) y + comb^T X        head  mean_i X_i

Shapes: T tokens, N streams, D hidden; fn [(2 + N) N, N D], base [(2 + N) N], scale [3].
Source: transformers 5.23 modeling_glm5_next.py:276-336 and 1313-1347.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hyper_read(
    x_TND: Tensor,
    fn: Tensor,
    base: Tensor,
    scale_3: Tensor,
    *,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h [T, D] in X.dtype, post [T, N] fp32, comb [T, N, N] fp32)."""
    num_streams = x_TND.shape[1]
    x32 = x_TND.float()
    flat = x32.flatten(1)
    normed = flat / torch.sqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    sizes = [num_streams, num_streams, num_streams**2]
    a, b, c = torch.split(normed @ fn.float().T, sizes, dim=1)
    base_a, base_b, base_c = torch.split(base.float(), sizes)
    s0, s1, s2 = scale_3.float().unbind()
    pre_TN = torch.sigmoid(a * s0 + base_a) + eps
    post_TN = 2 * torch.sigmoid(b * s1 + base_b)
    comb_TNN = torch.softmax((c * s2 + base_c).view(-1, num_streams, num_streams), dim=2) + eps
    for step in range(sinkhorn_iters):
        if step:
            comb_TNN = comb_TNN / (comb_TNN.sum(2, keepdim=True) + eps)
        comb_TNN = comb_TNN / (comb_TNN.sum(1, keepdim=True) + eps)
    return (pre_TN[..., None] * x32).sum(1).to(x_TND.dtype), post_TN, comb_TNN


def hyper_write(x_TND: Tensor, y_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Return the new streams [T, N, D] in X.dtype."""
    mixed = torch.einsum("tij,tid->tjd", comb_TNN.float(), x_TND.float())
    return (post_TN.float()[..., None] * y_TD.float()[:, None] + mixed).to(x_TND.dtype)


def hyper_head(x_TND: Tensor) -> Tensor:
    """Return the mean of the streams, [T, D], in X.dtype."""
    return (x_TND.float().sum(1) / x_TND.shape[1]).to(x_TND.dtype)
