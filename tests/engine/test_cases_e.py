"""Faults seen in other engines, restated: padding, scratch memory, stale tables, steps planned ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tagged_engine import ATTENTION, HYBRID, check, continuation, drain, slow, tagged_engine, tokens
from tiny_engine import NAMES, assert_solo, engine_of, greedy, prompt, run

from firstlight.engine.batch import BatchPlan
from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache

Tiny = Callable[[str], Path]
ASKED = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
@pytest.mark.parametrize("name", NAMES)
def test_e1_nobody_lives_in_scratch_memory_and_every_batch_size_is_exact(name: str, rows: int, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    execute = engine.runner.execute
    seen = []

    def watched(plan: BatchPlan) -> Any:
        for row in plan.rows:
            pages = [page for pages in row.hold.pages.values() for page in pages]
            assert row.hold.slot and all(pages)
            assert row.export is None or row.export[1]
        seen.append(len(plan.rows))
        return execute(plan)

    engine.runner.execute = watched
    # rows of different lengths: the tables of the short ones are padded
    assert_solo(tiny(name), run(engine, [prompt(20 * i + 5, i) for i in range(rows)], greedy(6)))
    assert max(seen) == rows


def test_e1_the_table_of_a_short_row_ends_in_the_scratch_page() -> None:
    pool = CachePool(HYBRID, num_tokens=640, num_slots=3)
    sequences = [SequenceCache(pool.blocks) for _ in range(3)]
    for sequence, length in zip(sequences, (1, 200, 64), strict=True):
        sequence.reserve(length)
    holds = [sequence.hold(length) for sequence, length in zip(sequences, (1, 200, 64), strict=True)]
    table = pool.views(holds)[0].pages["kv"].table_RN.tolist()
    assert [[page > 0 for page in row] for row in table] == [
        [True, False, False, False],
        [True, True, True, True],
        [True, False, False, False],
    ]
    # pages held beyond the step do not show either
    sequences[0].reserve(300)
    assert pool.views(holds)[0].pages["kv"].table_RN.tolist() == table


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next"])
def test_e1_a_row_that_is_not_scheduled_keeps_its_state(name: str, tiny: Tiny) -> None:
    # a waiting prompt holds its slot while steps go to others
    engine = engine_of(tiny(name), max_num_batched_tokens=8, max_num_seqs=6)
    assert_solo(tiny(name), run(engine, [prompt(30, i) for i in range(6)], greedy(6)))


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next", "deepseek_v32"])
def test_e2_a_prefill_that_leaves_does_not_lend_its_memory_to_the_next_batch(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), enable_prefix_caching=False)
    kept = [engine.add(prompt(10, i), greedy(16)) for i in range(2)]
    for when in range(4):
        leaving = engine.add(prompt(90, 10 + when), greedy(4))
        for _ in range(2):
            engine.step()
        engine.abort(leaving)
        kept.append(engine.add(prompt(12 + when, 20 + when), greedy(6)))
    while engine.has_work:
        engine.step()
    assert_solo(tiny(name), [engine.pop(one) for one in kept])


@pytest.mark.parametrize("decls", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_e3_a_step_for_requests_that_have_ended_writes_only_what_is_given_out_later(decls: tuple) -> None:
    # room for one: the second gets exactly the page and the slot that the void row of the first still writes
    engine = tagged_engine(decls, num_tokens=128, num_slots=2, prefix=False, before=slow)
    ids = [i % 50 for i in range(60)]
    stop = continuation(ids, 3)[-1]
    for first in range(4):
        other = [first, *ids[1:]]
        ended = engine.add(ids, SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[stop], detokenize=False))
        while not engine.output(ended).finished:
            engine.step()
            check(engine)
        # a step that was planned ahead is still running
        assert engine.has_work
        follower = engine.add(other, ASKED)
        drain(engine)
        assert tokens(engine.pop(ended)) == continuation(ids, 60, [stop])
        assert tokens(engine.pop(follower)) == continuation(other, 8)


def test_e3_an_idle_engine_runs_nothing() -> None:
    engine = tagged_engine()
    for _ in range(3):
        assert engine.step() == []
    assert engine.runner.plans == []
    assert engine.num_steps == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
def test_e6_tokens_carried_from_step_to_step_belong_to_their_rows(overlap: bool) -> None:
    # rows come, go and change places in every step
    engine = tagged_engine(overlap=overlap, num_tokens=64 * 12, num_slots=12, max_num_seqs=6)
    names = {}
    for number in range(40):
        ids = [(number * 7 + i) % 50 for i in range(1 + number * 13 % 40)]
        names[engine.add(ids, SamplingParams(temperature=0, max_tokens=1 + number % 7, detokenize=False))] = ids
        engine.step()
        check(engine)
        if number % 5 == 4:
            gone = engine.scheduler.running[len(engine.scheduler.running) // 2]
            name = engine.owner[gone.id][0].id
            engine.abort(name)
            del names[name]
    drain(engine)
    for name, ids in names.items():
        output = engine.pop(name)
        assert tokens(output) == continuation(ids, len(tokens(output)))
        assert output.outputs[0].finish_reason == "length"
