"""The one table of numeric tolerances, keyed by the dtype that was stored. None is relaxed for a single test.

An error is measured against |expected| + rms(expected): an element near zero is a cancelled sum of
terms of the tensor's scale, so it carries errors of that scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

# u = unit roundoff of the dtype: 2^-24 and 2^-8.
TOLERANCES: dict[torch.dtype, float] = {
    # body and reference sum up to n = 2^10 terms in different orders: an error of sqrt(n) u = 32 u per sum is expected;
    # ten dependent sums (scores, softmax, values, a state carried over chunks) give 320 u
    torch.float32: 320 * 2.0**-24,
    # the longest chain, experts, rounds gate, up, hidden, the expert's output and the sum; the reference rounds its
    # result; silu amplifies the rounding of the gate by |1 + g (1 - sigmoid g)| <= 3 for g >= -4: 3 + 5 = 8 u
    torch.bfloat16: 8 * 2.0**-8,
}


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |actual - expected| / (|expected| + rms(expected)); inf unless NaN and inf agree."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)} is not {tuple(expected.shape)}")
    a, e = actual.double(), expected.double()
    finite = e.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), e[~finite].nan_to_num()):
        return float("inf")
    a, e = a[finite], e[finite]
    scale = e.abs() + e.square().mean().sqrt()
    return float(((a - e).abs() / scale.clamp(min=torch.finfo(torch.float32).tiny)).max()) if e.numel() else 0.0


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare within the tolerance of dtype (default: the dtype of actual); integers exactly."""
    assert actual.dtype == expected.dtype or dtype is not None, f"dtype {actual.dtype} is not {expected.dtype}"
    if not expected.is_floating_point():
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        return
    found, limit = error(actual, expected), TOLERANCES[dtype or actual.dtype]
    assert found <= limit, f"error {found:.2e} exceeds {limit:.1e} of {dtype or actual.dtype}"
