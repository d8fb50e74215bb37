"""How far two tensors are apart, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.verify.report import Check, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Greatest absolute error, the same over the reference's greatest magnitude, and the token it is at."""

    error: float
    relative: float
    position: int | None


# what could not be computed at all
FAILED = Difference(error=float("inf"), relative=float("inf"), position=None)


def difference(ours: Tensor, theirs: Tensor) -> Difference:
    """Return how far two tensors of one shape are apart; infinite where either is not finite."""
    ours, theirs = ours.detach().float().reshape(theirs.shape), theirs.detach().float()
    if not theirs.numel():
        return Difference(error=0.0, relative=0.0, position=None)
    if not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
        bad = (
            (~torch.isfinite(ours) | ~torch.isfinite(theirs)).flatten(1).any(1)
            if ours.ndim > 1
            else ~torch.isfinite(ours)
        )
        return Difference(error=float("inf"), relative=float("inf"), position=int(bad.nonzero()[0]))
    gap = (ours - theirs).abs()
    per_token = gap.flatten(1).amax(1) if gap.ndim > 1 else gap
    error = float(gap.max())
    scale = float(theirs.abs().max())
    relative = error / scale if scale else (0.0 if error == 0 else float("inf"))
    return Difference(error=error, relative=relative, position=int(per_token.argmax()))


def judge(
    found: Difference,
    *,
    layer: int | None,
    module: str,
    kind: Kind,
    tolerance: float,
    reference: str,
    note: str = "",
    hint: str = "",
) -> Check:
    """Return the Check of a difference: passed iff its relative error is within tolerance."""
    passed = found.relative <= tolerance
    return Check(
        layer=layer,
        module=module,
        kind=kind,
        error=found.error,
        relative=found.relative,
        tolerance=tolerance,
        passed=passed,
        position=found.position,
        reference=reference,
        note=note,
        hint=hint,
    )
