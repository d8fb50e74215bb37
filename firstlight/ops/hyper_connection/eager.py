"""Hyper-connections, plain torch: the mixing weights in fp32. Equations and letters in ref.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    # the norm is one factor per token, so it is applied to the few outputs instead of the wide input
    factor_T1 = torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    sizes = [num_streams, num_streams, num_streams**2]
    scale = torch.cat([s.expand(size) for s, size in zip(scale_3.float().unbind(), sizes, strict=True)])
    logits = torch.addcmul(base.float(), F.linear(flat, fn.float()) * factor_T1, scale)
    gates_TN, comb = torch.split(logits, [2 * num_streams, num_streams**2], dim=1)
    pre_TN, post_TN = torch.sigmoid(gates_TN).chunk(2, dim=1)
    comb_TNN = _sinkhorn(torch.softmax(comb.view(-1, num_streams, num_streams), dim=2) + eps, sinkhorn_iters, eps)
    h_TD = ((pre_TN + eps)[:, None] @ x32)[:, 0]
    return h_TD.to(x_TND.dtype), 2 * post_TN, comb_TNN


def _sinkhorn(c_TNN: Tensor, iters: int, eps: float) -> Tensor:
    """Return c with its columns, then iters - 1 times its rows and columns, divided by their sums + eps.

    Kept as divisors u of the rows and w of the columns: dividing rows by their sums sets u to C (1 / w) + eps u,
    so that an iteration is four small operations.
    """
    w_TN1 = c_TNN.sum(1)[..., None] + eps
    u_TN1, columns_TNN = torch.ones_like(w_TN1), c_TNN.mT
    for _ in range(iters - 1):
        u_TN1.baddbmm_(c_TNN, w_TN1.reciprocal(), beta=eps)
        w_TN1.baddbmm_(columns_TNN, u_TN1.reciprocal(), beta=eps)
    return c_TNN / (u_TN1 * w_TN1.mT)


def hyper_write(x_TND: Tensor, y_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Return the new streams [T, N, D] in X.dtype."""
    added = post_TN.float()[..., None] * y_TD.float()[:, None]
    return torch.baddbmm(added, comb_TNN.float().mT, x_TND.float()).to(x_TND.dtype)


def hyper_head(x_TND: Tensor) -> Tensor:
    """Return the mean of the streams, [T, D], in X.dtype."""
    return x_TND.mean(1, dtype=torch.float32).to(x_TND.dtype)
