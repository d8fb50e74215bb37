"""Faults seen in other engines, restated: birth, reuse and death of recurrent state slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tagged_engine
from tagged_engine import HYBRID, continuation, tokens
from tiny_engine import HYBRIDS, assert_solo, check, drain, engine_of, greedy, prompt, run

from firstlight.engine.batch import BatchPlan
from firstlight.engine.core import Engine
from firstlight.engine.sampling_params import SamplingParams

Tiny = Callable[[str], Path]
ASKED = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
both_ways = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
hybrids = pytest.mark.parametrize("name", HYBRIDS)


@both_ways
@hybrids
def test_a1_first_chunk_of_one_token_starts_from_nothing(name: str, overlap: bool, tiny: Tiny) -> None:
    limits = {"state_slots": 2, "max_num_seqs": 2, "max_num_batched_tokens": 2, "enable_prefix_caching": False}
    engine = engine_of(tiny(name), overlap=overlap, **limits)
    # leaves its state in the slot that is given out next
    assert_solo(tiny(name), run(engine, [prompt(9, 5)], greedy(4)))
    decoding = engine.add(prompt(3, 6), greedy(14))
    while not engine.output(decoding).outputs[0].token_ids:
        engine.step()
    arriving = engine.add(prompt(6, 7), greedy(4))
    execute, pieces = engine.runner.execute, []

    def watched(plan: BatchPlan) -> Any:
        pieces.extend((row.start, row.n) for row in plan.rows if row.request.num_prompt == 6)
        return execute(plan)

    engine.runner.execute = watched
    drain(engine)
    assert pieces[:6] == [(start, 1) for start in range(6)]
    assert_solo(tiny(name), [engine.pop(decoding), engine.pop(arriving)])


@hybrids
def test_a1_prompt_of_one_token_starts_from_nothing(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), state_slots=1, max_num_seqs=1)
    for ids in (prompt(9, 5), prompt(1, 6), prompt(1, 7), prompt(70, 8), prompt(1, 6)):
        assert_solo(tiny(name), run(engine, [ids], greedy(4)))


def warm(slots: int = 3) -> tuple[Engine, list[int], list[str]]:
    """Return an engine with a cached prefix whose live slots are taken, the prefix, and who takes them."""
    engine = tagged_engine.tagged_engine(HYBRID, num_slots=slots)
    shared = [i % 50 for i in range(130)]
    tagged_engine.generate(engine, shared)
    return engine, shared, [engine.add([i + 1] * 20, ASKED) for i in range(slots - 1)]


@pytest.mark.parametrize("path", ["abort", "deadline", "pop", "close"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a2_a_queued_hit_that_ends_holds_nothing(path: str, steps: int) -> None:
    engine, shared, holders = warm()
    queued = engine.add([*shared, 1], ASKED, deadline_s=0.0 if path == "deadline" else None)
    for _ in range(steps if path != "deadline" else 0):
        engine.step()
        tagged_engine.check(engine)
    if path == "abort":
        engine.abort(queued)
    elif path == "pop":
        engine.pop(queued)
    elif path == "close":
        engine.close()
    tagged_engine.check(engine)
    if path != "close":
        tagged_engine.drain(engine)
        for i, name in enumerate(holders):
            assert tokens(engine.pop(name)) == continuation([i + 1] * 20, 8)
    engine.runner.pool.check_ledger([])


@pytest.mark.parametrize("short", ["slots", "pages"])
def test_a3_admission_that_fails_half_way_takes_nothing_and_succeeds_later(short: str) -> None:
    sizes = {"num_slots": 2, "num_tokens": 64 * 20} if short == "slots" else {"num_slots": 9, "num_tokens": 64 * 4}
    engine = tagged_engine.tagged_engine(HYBRID, prefix=False, **sizes)
    count = 2 if short == "slots" else 1
    holders = [engine.add([i + 1] * 150, ASKED) for i in range(count)]
    while len(engine.scheduler.running) < count:
        engine.step()
    late = engine.add([9] * 100, ASKED)
    request = engine.scheduler.waiting[0]
    blocks = engine.runner.pool.blocks
    before = blocks.slots.num_available, blocks.roles["kv"].pool.num_available
    for _ in range(3):
        engine.step()
        tagged_engine.check(engine)
        assert request.sequence is None
        assert (blocks.slots.num_available, blocks.roles["kv"].pool.num_available) == before
    tagged_engine.drain(engine)
    for ids, name in [*(([i + 1] * 150, name) for i, name in enumerate(holders)), ([9] * 100, late)]:
        assert tokens(engine.pop(name)) == continuation(ids, 8)


@both_ways
@hybrids
def test_a5_a_request_preempted_in_decode_resumes_from_a_fresh_state(name: str, overlap: bool, tiny: Tiny) -> None:
    # two pages for two sequences that outgrow one
    engine = engine_of(tiny(name), overlap=overlap, cache_tokens=128, max_num_seqs=2, enable_prefix_caching=False)
    names = [engine.add(prompt(60, seed), greedy(12)) for seed in (1, 2)]
    drain(engine)
    outputs = [engine.pop(one) for one in names]
    assert [output.metrics["num_preemptions"] > 0 for output in outputs] == [False, True]
    assert_solo(tiny(name), outputs)


@pytest.mark.parametrize("slots", [1, 2])
def test_a7_without_room_for_checkpoint_and_live_state_the_prefix_is_computed(slots: int) -> None:
    engine = tagged_engine.tagged_engine(HYBRID, num_slots=slots, max_num_seqs=1)
    ids = [i % 50 for i in range(130)]
    for _ in range(3):
        (output,) = tagged_engine.generate(engine, ids)
        assert tokens(output) == continuation(ids, 8)
        assert output.num_cached_tokens in ((0,) if slots == 1 else (0, 128))


def test_a7_a_checkpoint_is_kept_until_it_has_been_copied() -> None:
    engine = tagged_engine.tagged_engine(HYBRID, num_slots=3)
    ids = [i % 50 for i in range(130)]
    tagged_engine.generate(engine, ids)
    # a hit and two newcomers in one step: the last finds no slot but the one that is to be copied
    names = [engine.add(prompt_ids, ASKED) for prompt_ids in ([*ids, 3], [4] * 20, [5] * 20)]
    engine.step()
    tagged_engine.check(engine)
    tagged_engine.drain(engine)
    outputs = [engine.pop(name) for name in names]
    assert [output.num_cached_tokens for output in outputs] == [128, 0, 0]
    for output in outputs:
        assert tokens(output) == continuation(output.prompt_token_ids, 8)


@both_ways
def test_a7_a_copy_that_fails_fails_its_request_and_nothing_stale_is_used(overlap: bool, tiny: Tiny) -> None:
    folder = tiny("kimi_linear")
    engine = engine_of(folder, overlap=overlap)
    run(engine, [prompt(130)])
    copy = engine.runner.pool.copy_state

    def broken(source: int, target: int) -> None:
        raise OSError("no such entry")

    engine.runner.pool.copy_state = broken
    lost = engine.add(prompt(130), greedy())
    drain(engine)
    assert engine.output(lost).error == "OSError: no such entry"
    engine.runner.pool.copy_state = copy
    check(engine)
    assert_solo(folder, run(engine, [prompt(130), prompt(20)]))
