"""Chunked form of the gated delta rule (WY / UT transform), fp32.

With G the running sum of g inside a chunk and S the state before it, token i of the chunk writes d_i k_i^T where

    d_i = beta_i ( v_i - S (k_i exp G_i) - sum_{j < i} d_j (k_j . k_i exp(G_i - G_j)) )

so d solves a unit lower triangular system. Every exponent is a sum of g over a span, hence <= 0.

Shapes: X chunks, C = 64 tokens of a chunk, J heads, K key dim, V value dim; g has width K or 1.
Source: Yang et al. 2024 (parallel delta rule); Kimi Linear (2025) section 3 for decay per channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 64
# decays per channel are compared pairwise only inside a block: 16 * 16 * K values
BLOCK_TOKENS = 16
# bounds the pairwise workspace: J * 512 * 16 * K values
SPAN_TOKENS = 512
# its exp is 0 in fp32; keeps infinities out of differences
MIN_LOG_DECAY = -1000.0


def scan(
    s_JVK: Tensor, q_TJK: Tensor, k_TJK: Tensor, v_TJV: Tensor, g_TJK: Tensor, beta_TJ: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (o [T, J, V], state after the last token) of one sequence; q and k are normalised and scaled."""
    outputs = []
    for span in range(0, q_TJK.shape[0], SPAN_TOKENS):
        cut = slice(span, span + SPAN_TOKENS)
        out, s_JVK = _scan_span(s_JVK, q_TJK[cut], k_TJK[cut], v_TJV[cut], g_TJK[cut], beta_TJ[cut])
        outputs.append(out)
    return torch.cat(outputs), s_JVK


def _scan_span(
    s_JVK: Tensor, q_TJK: Tensor, k_TJK: Tensor, v_TJV: Tensor, g_TJK: Tensor, beta_TJ: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (_chunks(x) for x in (q_TJK, k_TJK, v_TJV, g_TJK, beta_TJ[..., None]))
    g = g.clamp(min=MIN_LOG_DECAY)
    # fp64: differences of these sums must keep fp32 precision
    total = g.double().cumsum(-2)
    qk, kk = _decayed_products(q, k, g, total)
    system = torch.eye(CHUNK_TOKENS, device=q.device) + beta * kk.tril(-1)
    from_start = total.float().exp()
    wanted = torch.cat([v, k * from_start], dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    u, w = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    q_start = q * from_start
    k_end = k * (total[..., -1:, :] - total).float().exp()
    outputs = []
    for x in range(q.shape[0]):
        d_JCV = u[x] - w[x] @ s_JVK.mT
        outputs.append(q_start[x] @ s_JVK.mT + qk[x] @ d_JCV)
        s_JVK = s_JVK * from_start[x, :, -1:] + d_JCV.mT @ k_end[x]
    out_TJV = torch.stack(outputs).transpose(1, 2).flatten(0, 1)
    return out_TJV[: q_TJK.shape[0]], s_JVK


def _chunks(x_TJD: Tensor) -> Tensor:
    """Return x as [X, J, C, D]; padding tokens are zero, so they neither decay nor write."""
    num_pad = -x_TJD.shape[0] % CHUNK_TOKENS
    padded = F.pad(x_TJD, (0, 0, 0, 0, 0, num_pad))
    return padded.reshape(-1, CHUNK_TOKENS, *x_TJD.shape[1:]).transpose(1, 2)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for a = q and a = k, sum_c a_i k_j exp(total_i - total_j), [X, J, C, C]; zero above the diagonal."""
    if g.shape[-1] == 1:
        lower = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).tril()
        decay = (total - total.mT).masked_fill(~lower, float("-inf")).float().exp()
        return q @ k.mT * decay, k @ k.mT * decay
    both = torch.stack([q, k], dim=-3)
    products = both.new_zeros(*both.shape[:-1], CHUNK_TOKENS)
    for begin in range(0, CHUNK_TOKENS, BLOCK_TOKENS):
        block = slice(begin, begin + BLOCK_TOKENS)
        products[..., block, block] = _block_products(both[..., block, :], k[..., block, :], g[..., block, :])
        if begin:
            # the sum up to the block splits the exponent into two parts, neither of them positive
            edge = total[..., begin - 1 : begin, :]
            left = both[..., block, :] * (total[..., block, :] - edge).float().exp()[..., None, :, :]
            right = k[..., :begin, :] * (edge - total[..., :begin, :]).float().exp()
            products[..., block, :begin] = left @ right.mT[..., None, :, :]
    qk, kk = products.unbind(-3)
    return qk, kk


def _block_products(both: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return the products of one block, [X, J, 2, B, B], from the decay of every pair."""
    later = torch.ones(BLOCK_TOKENS, BLOCK_TOKENS, dtype=torch.bool, device=k.device).tril(-1)
    # summing the decays between j and i, instead of subtracting two sums, cannot cancel
    between = torch.where(later[..., None], g[..., :, None, :], 0.0).cumsum(-3)
    pairs = between.exp() * k[..., None, :, :]
    return (pairs @ both.movedim(-3, -1)).movedim(-1, -3).tril()
