"""A state exported in passing is the state of a run that stops there; the row itself does not notice.

Every stateful body, compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from op_memory import paged, state
from tolerances import assert_close
from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.registry import operator_table
from firstlight.ops.rows import Export, Rows

TABLE = operator_table()
# 63 .. 65 and 127 .. 129 around the multiples of 64; fresh rows shorter than a window or a pool; one-token rows
PAIRS = [(0, 130), (0, 2), (9, 0), (61, 66), (130, 1), (0, 1), (3, 5), (62, 2), (63, 1), (64, 64), (1, 1), (127, 2)]
POSITIONS: dict[str, Callable[[int, int], int | None]] = {
    "first token": lambda start, n: start + 1,
    "second token": lambda start, n: start + 2 if n >= 2 else None,
    "middle": lambda start, n: start + (n + 1) // 2,
    "multiple of 64": lambda start, n: (start + n) // 64 * 64 if (start + n) // 64 * 64 > start else None,
    "end": lambda start, n: start + n,
}

Body = Callable[..., Any]
# a call on tokens of the inputs: (body, their numbers, state, table rows, rows) -> output
Call = Callable[[Body, Tensor, State, list[int], Rows], Tensor | None]


@dataclass(frozen=True)
class Case:
    """One operator with its inputs. pages: written as a side effect, if any."""

    operator: str
    state: State
    call: Call
    pages: Paged | None = None


def _slots(gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> State:
    """Return live slots of PAIRS, then as many free slots: both poisoned where nothing was stored."""
    return state(gen, PAIRS + [(0, 0)] * len(PAIRS), shape, dtype)


def _short_conv(gen: torch.Generator, dtype: torch.dtype, width: int) -> Case:
    x, weight = torch.randn(_num_tokens(), 12, generator=gen).to(dtype), torch.randn(12, width, generator=gen)
    return Case(
        "short_conv",
        _slots(gen, (width - 1, 12), dtype),
        lambda body, at, slots, _, rows: body(x[at], weight, slots, rows),
    )


def _delta_rule(gen: torch.Generator, dtype: torch.dtype, channel: bool) -> Case:
    q, k, v = (torch.randn(_num_tokens(), 4, 8, generator=gen).to(dtype) for _ in range(3))
    g = -torch.randn(*((_num_tokens(), 4, 8) if channel else (_num_tokens(), 4)), generator=gen).square()
    beta = torch.rand(_num_tokens(), 4, generator=gen)
    return Case(
        "delta_rule",
        _slots(gen, (4, 8, 8), torch.float32),
        lambda body, at, slots, _, rows: body(q[at], k[at], v[at], g[at], beta[at], slots, rows),
    )


def _index_pool(gen: torch.Generator, dtype: torch.dtype, size: int) -> Case:
    k, gate = (torch.randn(_num_tokens(), 8, generator=gen).to(dtype) for _ in range(2))
    ape = torch.randn(size, 8, generator=gen)
    keys = paged(gen, PAIRS, (8,), dtype, tokens_per_entry=size, page=3, written=[start // size for start, _ in PAIRS])

    def call(body: Body, at: Tensor, slots: State, chosen: list[int], rows: Rows) -> None:
        body(k[at], gate[at], ape, slots, Paged(keys.data, keys.table_RN[chosen], size), rows)

    return Case("index_pool", _slots(gen, (size, 2, 8), dtype), call, keys)


CASES: dict[str, Callable[[torch.Generator, torch.dtype], Case]] = {
    "short_conv": lambda gen, dtype: _short_conv(gen, dtype, 4),
    "short_conv, wide window": lambda gen, dtype: _short_conv(gen, dtype, 9),
    "delta_rule, channel": lambda gen, dtype: _delta_rule(gen, dtype, True),
    "delta_rule, head": lambda gen, dtype: _delta_rule(gen, dtype, False),
    "index_pool": lambda gen, dtype: _index_pool(gen, dtype, 4),
    "index_pool of 3": lambda gen, dtype: _index_pool(gen, dtype, 3),
}


def _num_tokens() -> int:
    return sum(n for _, n in PAIRS)


def _run(name: str, body: str, dtype: torch.dtype, parts: list[tuple[int, int, int, Export]]) -> tuple[Case, Any]:
    """Return the case after a step of parts: (row of PAIRS, tokens of it before the step, tokens, export)."""
    case = CASES[name](torch.Generator().manual_seed(17), dtype)
    begins = torch.tensor([0] + [n for _, n in PAIRS]).cumsum(0).tolist()
    at = [begins[row] + before + i for row, before, n, _ in parts for i in range(n)]
    rows = Rows.of([(PAIRS[row][0] + before, n) for row, before, n, _ in parts], exports=[part[3] for part in parts])
    chosen = [row for row, *_ in parts]
    slots = State(case.state.data, case.state.slots_R[chosen])
    run = TABLE[case.operator].impl(body).load()
    return case, case.call(run, torch.tensor(at, dtype=torch.int64), slots, chosen, rows)


def _exports(case_state: State, where: str, every: int) -> list[Export]:
    """Return the export of every `every`-th row, to the free slot of its number."""
    free = case_state.slots_R[len(PAIRS) :].tolist()
    found: list[Export] = []
    for row, (start, n) in enumerate(PAIRS):
        position = POSITIONS[where](start, n) if n and row % every == 0 else None
        found.append(None if position is None else (position, free[row]))
    return found


BODIES = [(name, impl.name) for name in CASES for impl in TABLE[name.split(",")[0].split(" ")[0]].impls]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "body"), BODIES)
def test_an_export_is_the_state_of_a_run_that_stops_there(
    name: str, body: str, dtype: torch.dtype, where: str, every: int
) -> None:
    before = CASES[name](torch.Generator().manual_seed(17), dtype).state
    exports = _exports(before, where, every)
    step = [(row, 0, n, exports[row]) for row, (_, n) in enumerate(PAIRS)]
    exported, _ = _run(name, body, dtype, step)
    assert any(exports)
    for row, export in enumerate(exports):
        if export is not None:
            position, slot = export
            stopped, _ = _run(name, body, dtype, [(row, 0, position - PAIRS[row][0], None)])
            assert_close(exported.state.data[slot], stopped.state.data[stopped.state.slots_R[row]])


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "body"), BODIES)
def test_exporting_changes_no_output_no_live_state_and_no_other_slot(
    name: str, body: str, dtype: torch.dtype, where: str
) -> None:
    before = CASES[name](torch.Generator().manual_seed(17), dtype).state
    exports = _exports(before, where, 2)
    plain, expected = _run(name, body, dtype, [(row, 0, n, None) for row, (_, n) in enumerate(PAIRS)])
    found, output = _run(name, body, dtype, [(row, 0, n, exports[row]) for row, (_, n) in enumerate(PAIRS)])
    if expected is not None:
        assert_close(output, expected)
    if plain.pages is not None and found.pages is not None:
        assert_close(found.pages.data, plain.pages.data)
    live = before.slots_R[: len(PAIRS)]
    assert_close(found.state.data[live], plain.state.data[live])
    written = {*live.tolist(), *(export[1] for export in exports if export)}
    others = [slot for slot in range(before.data.shape[0]) if slot not in written]
    assert len(others) > len(PAIRS) // 2
    torch.testing.assert_close(found.state.data[others], before.data[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "body"), BODIES)
def test_a_row_resumed_from_an_export_ends_as_the_row_that_was_not_cut(name: str, body: str) -> None:
    row, cut = 0, 64
    whole, _ = _run(name, body, torch.float32, [(row, 0, 130, None)])
    case = CASES[name](torch.Generator().manual_seed(17), torch.float32)
    free = int(case.state.slots_R[len(PAIRS)])
    exported, _ = _run(name, body, torch.float32, [(row, 0, 130, (cut, free))])
    run = TABLE[case.operator].impl(body).load()
    resumed = State(exported.state.data, torch.tensor([free]))
    exported.call(run, torch.arange(cut, 130), resumed, [row], Rows.of([(cut, 130 - cut)]))
    assert_close(resumed.data[free], whole.state.data[whole.state.slots_R[row]])
