"""A verification in few lines: one row per layer, and the command that repeats a failure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.verify.report import Check, VerifyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer (None: outside the layers). worst: the check nearest to, or furthest beyond, its tolerance."""

    layer: int | None
    num_checks: int
    worst: Check
    recall: float | None
    failed: tuple[Check, ...]


def layer_rows(report: VerifyReport) -> tuple[LayerRow, ...]:
    """Return a row per layer, in the order of the checks."""
    groups: dict[int | None, list[Check]] = {}
    for check in report.checks:
        groups.setdefault(check.layer, []).append(check)
    return tuple(_row(layer, checks) for layer, checks in groups.items())


def worst_by_place(report: VerifyReport) -> tuple[tuple[Check, int], ...]:
    """Return the worst check of each place and kind, and of how many: a module may have several outputs."""
    groups: dict[tuple[str, str, str], list[Check]] = {}
    for check in report.checks:
        groups.setdefault((check.place, check.kind, check.reference), []).append(check)
    return tuple((max(checks, key=severity), len(checks)) for checks in groups.values())


def _row(layer: int | None, checks: list[Check]) -> LayerRow:
    recalls = [check.recall for check in checks if check.recall is not None]
    return LayerRow(
        layer=layer,
        num_checks=len(checks),
        worst=max(checks, key=severity),
        recall=min(recalls, default=None),
        failed=tuple(check for check in checks if not check.passed),
    )


def severity(check: Check) -> float:
    """Return the relative error over its tolerance; above 1 a check has failed."""
    if check.tolerance:
        return check.relative / check.tolerance
    return float("inf") if check.relative else 0.0


def repro(report: VerifyReport, check: Check, *, model: str, reference: str, flags: Sequence[str] = ()) -> str:
    """Return the command that repeats the failure alone. flags: those that the verification was given besides."""
    words = ["firstlight", "verify", model]
    words += [] if check.layer is None else ["--layers", str(check.layer)]
    words += ["--tokens", str(report.num_tokens), "--reference", reference, *flags]
    return shlex.join(words)
