"""A verification in few lines."""

from __future__ import annotations

import pytest

from firstlight.verify.report import Check, Kind, VerifyReport
from firstlight.verify.summary import layer_rows, repro, severity


def check(layer: int | None, module: str, relative: float, *, kind: Kind = "module", tolerance: float = 1e-5) -> Check:
    """Return a check that passed if relative is within tolerance."""
    passed, recall = relative <= tolerance, 0.5 if kind == "selection" else None
    return Check(
        layer=layer,
        module=module,
        kind=kind,
        error=relative,
        relative=relative,
        tolerance=tolerance,
        passed=passed,
        recall=recall,
    )


def report(*checks: Check) -> VerifyReport:
    """Return a report of these checks."""
    return VerifyReport(
        model="m",
        model_type="llama",
        port="p",
        reference="transformers 5",
        dtype="float32",
        num_tokens=9,
        layers=(0, 1),
        checks=checks,
        seconds=1.0,
        versions={},
    )


def test_rows_hold_the_worst_check_by_its_own_tolerance() -> None:
    strict = check(0, "mixer.index", 1e-9, kind="selection", tolerance=0.0)
    checks = (check(0, "a", 9e-6), check(0, "b", 1e-5, tolerance=1e-4), strict, check(None, "logits", 0.0))
    first, outside = layer_rows(report(*checks))
    assert (first.layer, first.num_checks, first.worst, first.recall) == (0, 3, strict, 0.5)
    assert first.failed == (strict,)
    assert (outside.layer, outside.failed, outside.recall) == (None, (), None)


@pytest.mark.parametrize(
    ("relative", "tolerance", "expected"), [(0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (2.0, 4.0, 0.5)]
)
def test_severity_is_the_share_of_the_tolerance(relative: float, tolerance: float, expected: float) -> None:
    assert severity(check(0, "a", relative, tolerance=tolerance)) == expected


def test_repro_is_a_command_that_a_shell_reads() -> None:
    inside, outside = check(3, "mixer", 1.0), check(None, "logits", 1.0)
    found = repro(report(inside), inside, model="./my model", reference="ref", flags=("--op", "mla=ref"))
    assert found == "firstlight verify './my model' --layers 3 --tokens 9 --reference ref --op mla=ref"
    assert "--layers" not in repro(report(outside), outside, model="m", reference="ref")
