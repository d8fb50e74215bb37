"""The engine's promises to its callers: refusals, aborts, faults, overlap and news."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tagged_engine
import tiny_engine
import torch
from tagged_engine import HYBRID, continuation, tokens
from tagged_engine import tagged_engine as make
from tiny_engine import assert_solo, drain, engine_of, greedy, prompt, run

from firstlight.engine.args import EngineArgs
from firstlight.engine.batch import BatchPlan
from firstlight.engine.llm import LLM
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError

Tiny = Callable[[str], Path]
both_ways = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
IDS = [i % 50 for i in range(100)]
EIGHT = SamplingParams(temperature=0, max_tokens=8, detokenize=False)


class Faults:
    """Fails steps on demand. always: every step; at: these, counted from 1; of: those of a request."""

    def __init__(self, *, always: bool = False, at: tuple[int, ...] = (), of: int | None = None) -> None:
        self.always, self.at, self.of, self.count = always, at, of, 0

    def __call__(self, plan: BatchPlan) -> None:
        self.count += 1
        if self.always or self.count in self.at or self.of in [row.request.id for row in plan.rows]:
            raise RuntimeError("out of ideas")


@both_ways
def test_a_failing_step_fails_its_requests_with_the_cause_and_the_engine_serves_on(overlap: bool) -> None:
    engine = make(overlap=overlap, before=Faults(at=(3,)))
    one, two = engine.add(IDS, EIGHT), engine.add(IDS[:10], EIGHT)
    while engine.num_steps != 3:
        engine.step()
        tagged_engine.check(engine)
    late = engine.add(IDS[50:], EIGHT)
    tagged_engine.drain(engine)
    for name in (one, two):
        assert engine.output(name).error == "RuntimeError: out of ideas"
        assert engine.pop(name).outputs[0].finish_reason == "error"
    assert engine.output(late).error == ""
    assert tokens(engine.pop(late)) == continuation(IDS[50:], 8)


@both_ways
def test_requests_outside_a_failing_step_do_not_notice(overlap: bool) -> None:
    # one sequence at a time: the second waits while the first fails
    engine = make(overlap=overlap, before=Faults(of=0), max_num_seqs=1)
    bad, good = engine.add(IDS, EIGHT), engine.add(IDS, EIGHT)
    tagged_engine.drain(engine)
    assert engine.pop(bad).outputs[0].finish_reason == "error"
    assert tokens(engine.pop(good)) == continuation(IDS, 8)


@both_ways
def test_an_operator_that_always_fails_ends_every_request_once(overlap: bool) -> None:
    engine = make(overlap=overlap, before=Faults(always=True))
    names = [engine.add(IDS[:n], EIGHT) for n in (1, 30, 100, 64)]
    assert tagged_engine.drain(engine, limit=20) <= 20
    assert [engine.pop(name).outputs[0].finish_reason for name in names] == ["error"] * 4


@both_ways
def test_an_operator_of_the_model_that_fails_is_named(overlap: bool, tiny: Tiny) -> None:
    folder = tiny("kimi_linear")
    engine = engine_of(folder, overlap=overlap)
    forward, calls = engine.runner.model.layers[3].forward, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("a bad shape")
        return forward(*args)

    engine.runner.model.layers[3].forward = failing
    names = [engine.add(prompt(length, length), greedy()) for length in (20, 90)]
    drain(engine)
    assert [engine.output(name).error for name in names] == ["ValueError: a bad shape"] * 2
    # pages and states of the failed step are not found by others
    assert_solo(folder, run(engine, [prompt(20, 20), prompt(90, 90)]))


@both_ways
def test_broken_logits_end_their_own_request_only(overlap: bool, tiny: Tiny) -> None:
    folder = tiny("qwen3_moe")
    engine = engine_of(folder, overlap=overlap)
    logits = engine.runner.model.logits

    def broken(hidden_TH: torch.Tensor, ops: Any) -> torch.Tensor:
        out = logits(hidden_TH, ops)
        return out.index_fill(0, torch.tensor([0]), float("nan")) if len(out) == 2 else out

    engine.runner.model.logits = broken
    names = [engine.add(prompt(length, length), greedy()) for length in (20, 21)]
    drain(engine)
    assert "not finite" in engine.output(names[0]).error
    assert engine.pop(names[0]).outputs[0].finish_reason == "error"
    assert_solo(folder, [engine.pop(names[1])])


@both_ways
def test_broken_prompt_logprobs_end_their_own_request_only(overlap: bool, tiny: Tiny) -> None:
    folder = tiny("qwen3_moe")
    engine = engine_of(folder, overlap=overlap)
    logits = engine.runner.model.logits
    # only the prompt's own logits have this many rows
    engine.runner.model.logits = lambda h, ops: logits(h, ops) * (float("nan") if len(h) == 19 else 1)
    names = [engine.add(prompt(20), greedy(prompt_logprobs=0)), engine.add(prompt(21), greedy())]
    drain(engine)
    assert "not finite" in engine.output(names[0]).error
    assert_solo(folder, [engine.pop(names[1])])


def test_a_prefix_behind_broken_logits_is_computed_again() -> None:
    engine = make()
    engine.runner.broken.add((0, 64))
    first = engine.add(IDS[:64], EIGHT)
    tagged_engine.drain(engine)
    assert engine.output(first).error == "broken"
    (second,) = tagged_engine.generate(engine, IDS)
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("name", tiny_engine.NAMES)
def test_overlap_changes_no_output(name: str, tiny: Tiny) -> None:
    asked = SamplingParams(temperature=0.7, seed=5, max_tokens=20, logprobs=2, repetition_penalty=1.2, detokenize=False)
    prompts = [prompt(length, length) for length in (3, 40, 70, 129)]
    found = [
        [output.outputs[0] for output in run(engine_of(tiny(name), overlap=way), prompts, asked)]
        for way in (True, False)
    ]
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
    assert [one.finish_reason for one in found[0]] == [one.finish_reason for one in found[1]]


def test_overlap_takes_no_more_steps_than_going_in_turn() -> None:
    counts = []
    for overlap in (True, False):
        engine = make(overlap=overlap)
        tagged_engine.generate(engine, IDS, max_tokens=30)
        counts.append(engine.num_steps)
    assert counts[0] == counts[1]


def test_a_request_that_ends_while_its_next_token_runs_disturbs_nobody() -> None:
    # the step waits, so that memory is given back before it begins to read
    engine = make(before=tagged_engine.slow)
    stop = continuation(IDS, 5)[-1]
    stopped = engine.add(IDS, replace(EIGHT, max_tokens=30, stop_token_ids=(stop,)))
    other = engine.add(IDS[:3], replace(EIGHT, max_tokens=30))
    tagged_engine.drain(engine)
    assert tokens(engine.pop(stopped)) == continuation(IDS, 30, [stop])
    assert tokens(engine.pop(other)) == continuation(IDS[:3], 30)


def test_memory_given_back_while_a_step_runs_does_not_move_under_it(tiny: Tiny) -> None:
    folder = tiny("glm5_next")
    engine = engine_of(folder)
    execute = engine.runner.execute

    def late(plan: BatchPlan) -> Any:
        time.sleep(0.002)
        return execute(plan)

    engine.runner.execute = late
    for steps in range(5):
        long, short = engine.add(prompt(150), greedy(12)), engine.add(prompt(5), greedy(12))
        for _ in range(steps):
            engine.step()
        engine.abort(long)
        drain(engine)
        assert engine.output(short).error == ""
        assert_solo(folder, [engine.pop(short)])


@both_ways
def test_an_abort_says_so_once_and_keeps_what_there_was(overlap: bool) -> None:
    engine = make(overlap=overlap)
    name = engine.add(IDS, replace(EIGHT, max_tokens=100))
    for _ in range(6):
        engine.step()
    before = len(tokens(engine.output(name)))
    engine.abort(name)
    engine.abort(name)
    engine.abort("nobody")
    news = engine.step()
    assert [(update.request_id, update.delta.finish_reason) for update in news] == [(name, "abort")]
    tagged_engine.drain(engine)
    output = engine.pop(name)
    assert before > 0
    assert tokens(output) == continuation(IDS, before)
    assert output.finished


def test_a_deadline_ends_a_request() -> None:
    engine = make()
    name, patient = engine.add(IDS, EIGHT, deadline_s=0.0), engine.add(IDS, EIGHT, deadline_s=60.0)
    tagged_engine.drain(engine)
    assert engine.pop(name).outputs[0].finish_reason == "abort"
    assert tokens(engine.pop(patient)) == continuation(IDS, 8)


REFUSED: dict[str, tuple[list[Any], SamplingParams, str]] = {
    "empty prompt": ([], EIGHT, "prompt is empty"),
    "id above": ([1, 50], EIGHT, "token id 50 at position 1"),
    "id below": ([-1], EIGHT, "token id -1"),
    "no id": ([1.5], EIGHT, "1.5"),
    "prompt of the limit": ([1] * 4096, EIGHT, "4096 tokens, the maximum is 4095"),
    "prompt and max_tokens": ([1] * 4089, EIGHT, "4097 tokens, the maximum is 4096"),
    "never fits": ([1] * 1020, EIGHT, "1027 tokens; the arenas hold 1024"),
    "stop without a tokenizer": ([1], replace(EIGHT, detokenize=True, stop=("x",)), "no tokenizer"),
    "stop id": ([1], replace(EIGHT, stop_token_ids=(50,)), "stop_token_ids"),
    "bias": ([1], replace(EIGHT, logit_bias={50: 1.0}), "logit_bias"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_run_is_refused_at_once_and_disturbs_nothing(why: str) -> None:
    ids, params, words = REFUSED[why]
    engine = make()
    running = engine.add(IDS, EIGHT)
    engine.step()
    waiting = list(engine.scheduler.waiting)
    with pytest.raises(ValueError) as caught:
        engine.add(ids, params)
    assert words in str(caught.value)
    assert engine.scheduler.waiting == waiting
    assert list(engine.groups) == [running]
    tagged_engine.drain(engine)
    assert tokens(engine.pop(running)) == continuation(IDS, 8)


def test_the_largest_request_that_fits_runs() -> None:
    engine = make()
    ids = [i % 50 for i in range(1017)]
    (output,) = tagged_engine.generate(engine, ids)
    assert tokens(output) == continuation(ids, 8)


def test_a_name_in_use_is_refused() -> None:
    engine = make()
    engine.add(IDS, EIGHT, request_id="mine")
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add(IDS, EIGHT, request_id="mine")
    tagged_engine.drain(engine)
    engine.pop("mine")
    engine.add(IDS, EIGHT, request_id="mine")


def test_the_news_of_a_request_are_its_tokens_in_order() -> None:
    engine = make()
    names = [engine.add(IDS[i:], EIGHT) for i in range(3)]
    counts = dict.fromkeys(names, 0)
    ends = []
    while engine.has_work:
        for update in engine.step():
            counts[update.request_id] += 1
            ends += [update.request_id] if update.delta.finished else []
            assert len(tokens(engine.output(update.request_id))) >= counts[update.request_id]
    assert counts == dict.fromkeys(names, 8)
    assert sorted(ends) == names


def test_nothing_is_said_of_a_request_that_was_forgotten() -> None:
    engine = make()
    gone, kept = engine.add(IDS, EIGHT), engine.add(IDS, EIGHT)
    engine.step()
    engine.pop(gone)
    while engine.has_work:
        assert {update.request_id for update in engine.step()} <= {kept}


def test_closing_ends_what_runs() -> None:
    engine = make(before=tagged_engine.slow)
    names = [engine.add(IDS, replace(EIGHT, max_tokens=100)) for _ in range(3)]
    for _ in range(5):
        engine.step()
    engine.close()
    assert all(engine.output(name).finished for name in names)
    engine.runner.pool.check_ledger([])


def test_the_idle_check_notices_a_leak() -> None:
    engine = make(HYBRID, overlap=False)
    engine.runner.pool.blocks.slots.allocate(1)
    engine.add(IDS, EIGHT)
    with pytest.raises(AssertionError, match="held"):
        tagged_engine.drain(engine)


def test_metrics_count_preemptions_and_time_the_first_token() -> None:
    engine = make(num_tokens=256, max_num_seqs=4)
    outputs = tagged_engine.generate(engine, *[IDS[i : i + 60] for i in range(4)], max_tokens=60)
    assert sum(output.metrics["num_preemptions"] for output in outputs) == engine.scheduler.num_preemptions > 0
    assert all(output.metrics["first_token_s"] > 0 for output in outputs)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    """Return the offline interface over a tiny checkpoint without a tokenizer."""
    sizes = EngineArgs(cache_tokens=1024, state_slots=8)
    return LLM(str(tiny("kimi_linear")), dtype="float32", max_model_len=512, max_num_seqs=4, engine_args=sizes)


def test_a_stream_that_is_left_does_not_trouble_the_next_call(llm: LLM, tiny: Tiny) -> None:
    stream = llm.stream(prompt(50), greedy(20))
    next(stream)
    stream.close()
    assert_solo(tiny("kimi_linear"), llm.generate([prompt(20), prompt(30)], greedy()))
    assert llm.engine.groups == {}


def test_streams_and_calls_in_turns_each_end_whole(llm: LLM, tiny: Tiny) -> None:
    one, two = llm.stream(prompt(50), greedy(6)), llm.stream(prompt(60), greedy(6))
    next(one)
    next(two)
    outputs = llm.generate([prompt(20)], greedy(12))
    ends = [list(stream)[-1] for stream in (one, two)]
    assert all(end.finished for end in ends)
    assert_solo(tiny("kimi_linear"), [*outputs, *ends])


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(FirstlightError, match="token id 256"):
        llm.generate([prompt(20), [256]], greedy())
    assert llm.engine.groups == {}
    assert not llm.engine.scheduler.has_work
