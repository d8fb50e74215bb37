"""Every body that the table lists, against the reference of its operator."""

from __future__ import annotations

import pytest
import torch
from op_cases import MAKERS, Call, Setting
from op_memory import SCENARIOS, rows_of
from tolerances import assert_close
from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.registry import Impl, OperatorTable, operator_table
from firstlight.spec.bind import BindContext

TABLE = operator_table()
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _accepted() -> list[tuple[str, str, str, str, str]]:
    found = []
    for operator in (TABLE[name] for name in TABLE.names()):
        for impl in operator.impls:
            for dtype in DTYPES:
                for device in DEVICES:
                    for scenario in SCENARIOS:
                        stage = "decode" if rows_of(scenario).is_decode else "prefill"
                        ctx = BindContext(stage=stage, dtype=dtype, device=device)
                        if impl.name != "ref" and impl.rejects(ctx) is None:
                            found.append((operator.name, impl.name, dtype, device, scenario))
    return found


def _calls(operator: str, dtype: str, device: str, scenario: str) -> list[Call]:
    setting = Setting(DTYPES[dtype], device, scenario, torch.Generator().manual_seed(7))
    return list(MAKERS[operator](setting))


def _run(impl: Impl, call: Call) -> list[Tensor]:
    """Return what the call returned and every cache it was given, which it may have written."""
    result = impl.load()(*call.args, **call.kwargs)
    returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return returned + [arg.data for arg in call.args if isinstance(arg, Paged | State)]


@pytest.mark.parametrize(("operator", "body", "dtype", "device", "scenario"), _accepted())
def test_a_body_computes_what_the_reference_computes(
    operator: str, body: str, dtype: str, device: str, scenario: str
) -> None:
    expected_calls = _calls(operator, dtype, device, scenario)
    for call, again in zip(_calls(operator, dtype, device, scenario), expected_calls, strict=True):
        found = _run(TABLE[operator].impl(body), call)
        expected = _run(TABLE[operator].impl("ref"), again)
        for actual, truth in zip(found, expected, strict=True):
            try:
                # an fp32 result of bf16 inputs is exact to fp32: nothing was rounded on the way in
                assert_close(actual, truth)
            except AssertionError as failure:
                raise AssertionError(f"{operator}/{body}, case {call.name!r}: {failure}") from failure


def test_every_operator_has_a_reference_a_second_body_and_cases(table: OperatorTable) -> None:
    assert set(MAKERS) == set(table.names())
    for name in table.names():
        assert {"ref", "eager"} <= {impl.name for impl in table[name].impls}
        assert all(callable(impl.load()) for impl in table[name].impls)


def test_the_suite_runs_every_body_in_both_dtypes() -> None:
    ran = {(operator, body, dtype) for operator, body, dtype, *_ in _accepted()}
    assert {(name, impl.name, dtype) for name in TABLE.names() for impl in TABLE[name].impls for dtype in DTYPES} == (
        ran | {(name, "ref", dtype) for name in TABLE.names() for dtype in DTYPES}
    )
