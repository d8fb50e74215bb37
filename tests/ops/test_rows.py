"""Rows of a step: export positions, pieces, and the dense groups that bodies compute at once."""

from __future__ import annotations

import pytest
import torch
from op_cases import MAKERS, Setting
from op_memory import SCENARIOS, rows_of
from tolerances import assert_close

from firstlight.ops import groups
from firstlight.ops.registry import operator_table
from firstlight.ops.rows import Rows

TABLE = operator_table()
GROUPED = ["attention", "mla", "index_topk", "index_pool", "short_conv", "delta_rule"]


def test_pieces_cut_a_row_where_its_state_is_exported() -> None:
    rows = Rows.of([(3, 4), (0, 2), (5, 0), (9, 1)], exports=[(5, 7), (2, 8), None, (10, 9)])
    assert list(rows.pieces()) == [
        (0, 3, 2, slice(0, 2), 7),
        (0, 5, 2, slice(2, 4), None),
        (1, 0, 2, slice(4, 6), 8),
        (2, 5, 0, slice(6, 6), None),
        (3, 9, 1, slice(6, 7), 9),
    ]
    assert list(Rows.of([(3, 4)]).pieces()) == [(0, 3, 4, slice(0, 4), None)]


@pytest.mark.parametrize("position", [3, 8, 0])
def test_an_export_outside_its_row_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="outside the row"):
        Rows.of([(3, 4)], exports=[(position, 1)])


def test_exports_for_some_of_the_rows_only_are_refused() -> None:
    with pytest.raises(ValueError):
        Rows.of([(3, 4), (0, 1)], exports=[(5, 1)])


@pytest.mark.parametrize("bound", [0, 100, 1 << 30])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_groups_hold_every_token_once(scenario: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_PADDED", bound)
    rows = rows_of(scenario)
    number_T = torch.arange(rows.num_tokens)
    seen = [group.take(number_T) for group in rows.groups]
    assert sorted(torch.cat([numbers.flatten() for numbers in seen]).tolist() if seen else []) == number_T.tolist()
    for group, number_Rn in zip(rows.groups, seen, strict=True):
        assert torch.equal(rows.positions_T[number_Rn], group.position_Rn)
        assert torch.equal(rows.row_T[number_Rn], group.row_R[:, None].expand(-1, group.n))
        assert group.starts == tuple(rows.starts[row] for row in group.row_R.tolist())
        assert {rows.lengths[row] for row in group.row_R.tolist()} == {group.n}
        assert group.size == 1 or group.size * group.n * group.longest <= bound
        out_T = torch.zeros_like(number_T)
        group.put(out_T, number_Rn)
        assert torch.equal(group.take(out_T), number_Rn)


def test_one_token_rows_are_one_group_whatever_lies_between_them() -> None:
    rows = Rows.of([(40, 1), (0, 5), (9, 0), (0, 1), (63, 1)])
    assert [group.row_R.tolist() for group in rows.groups] == [[0, 3, 4], [1]]


def test_a_row_with_an_export_before_its_end_is_alone() -> None:
    rows = Rows.of([(0, 4), (8, 4), (2, 4), (6, 1)], exports=[None, (10, 3), (6, 5), (7, 6)])
    assert [group.row_R.tolist() for group in rows.groups] == [[0, 2], [1], [3]]
    assert [group.exports for group in rows.groups] == [((1, 5),), (), ((0, 6),)]
    assert [group.inner_export for group in rows.groups] == [None, (2, 3), None]


@pytest.mark.parametrize("bound", [0, 150, 1 << 30])
@pytest.mark.parametrize("scenario", ["ragged", "decode", "equal"])
@pytest.mark.parametrize(("operator", "body"), [(op, i.name) for op in GROUPED for i in TABLE[op].impls])
def test_results_do_not_depend_on_the_grouping(
    operator: str, body: str, scenario: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls() -> list[tuple[tuple[object, ...], dict[str, object]]]:
        setting = Setting(torch.float32, "cpu", scenario, torch.Generator().manual_seed(7))
        return [(call.args, call.kwargs) for call in MAKERS[operator](setting)]

    run, expected_calls = TABLE[operator].impl(body).load(), calls()
    monkeypatch.setattr(groups, "MAX_PADDED", bound)
    for (args, kwargs), (again, _) in zip(calls(), expected_calls, strict=True):
        found, expected = run(*args, **kwargs), run(*again, **kwargs)
        if expected is not None:
            assert_close(found, expected)
        for one, other in zip(args, again, strict=True):
            if hasattr(one, "data") and not isinstance(one, torch.Tensor):
                assert_close(one.data, other.data)  # type: ignore[attr-defined]
