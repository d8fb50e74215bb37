"""Faults seen in other engines, restated: sampling, log-probabilities, determinism."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_engine import HYBRIDS, LOGPROB_TOLERANCE, assert_solo, engine_of, greedy, prompt, run, solo_runner

from firstlight.engine.core import Engine
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.sequence import SequenceCache

Tiny = Callable[[str], Path]
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, detokenize=False)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("late", [0, 1, 4])
@pytest.mark.parametrize("neighbours", [0, 1, 2, 3])
def test_o1_unseeded_neighbours_do_not_move_a_seeded_draw(neighbours: int, late: int, tiny: Tiny) -> None:
    folder = tiny("kimi_linear")
    (alone,) = run(engine_of(folder), [prompt(30)], SEEDED)
    engine = engine_of(folder)
    order = ["seeded", *["other"] * neighbours]
    random.Random(late).shuffle(order)
    names = {}
    for place, kind in enumerate(order):
        name = engine.add(prompt(30 if kind == "seeded" else 10 + place), SEEDED if kind == "seeded" else UNSEEDED)
        names[name] = kind
        for _ in range(late):
            engine.step()
    while engine.has_work:
        engine.step()
    (found,) = [engine.pop(name) for name, kind in names.items() if kind == "seeded"]
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids


def test_o1_requests_without_a_seed_differ_and_an_engine_seed_repeats_them(tiny: Tiny) -> None:
    found = []
    for seed in (0, 0, 1):
        outputs = run(engine_of(tiny("qwen3_moe"), seed=seed), [prompt(20)] * 3, UNSEEDED)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert len(set(found[0])) == 3
    assert found[0] == found[1] != found[2]


def values(output: RequestOutput) -> list[float]:
    """Return the prompt's log-probabilities: one value for every token but the first."""
    scored = output.prompt_logprobs
    assert scored is not None
    assert len(scored) == len(output.prompt_token_ids)
    assert scored[0] is None
    pairs = zip(output.prompt_token_ids[1:], scored[1:], strict=True)
    return [entries[token].logprob for token, entries in pairs if entries is not None]


def closest(one: list[float], other: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32"])
def test_o3_prompt_logprobs_are_right_cold_warm_and_after_another_request(name: str, tiny: Tiny) -> None:
    folder = tiny(name)
    runner, ids = solo_runner(folder), prompt(140)
    sequence = SequenceCache(runner.pool.blocks)
    logprobs_TV = runner.run(sequence, ids, all_logits=True).log_softmax(-1)
    sequence.release()
    expected = logprobs_TV[torch.arange(139), torch.tensor(ids[1:])].tolist()
    engine, asked = engine_of(folder), greedy(3, prompt_logprobs=0)
    for _ in range(2):
        assert closest(values(run(engine, [ids], asked)[0]), expected) <= LOGPROB_TOLERANCE
    # a prefix cached by a plain request, and one of somebody else
    run(engine, [ids, prompt(100, 9)])
    together = run(engine, [prompt(100, 9), ids], asked)
    assert closest(values(together[1]), expected) <= LOGPROB_TOLERANCE


def test_o3_the_first_prompt_token_alone_has_no_value(tiny: Tiny) -> None:
    (output,) = run(engine_of(tiny("qwen3_moe")), [prompt(1)], greedy(2, prompt_logprobs=2))
    assert output.prompt_logprobs == (None,)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32"])
def test_o4_logprobs_do_not_depend_on_the_chunks(name: str, chunk: int, tiny: Tiny) -> None:
    asked = greedy(4, prompt_logprobs=1)
    found = []
    for budget in (512, chunk):
        limits = {"max_num_seqs": 1, "max_num_batched_tokens": budget}
        (output,) = run(engine_of(tiny(name), **limits), [prompt(40)], asked)
        assert_solo(tiny(name), [output])
        found.append(values(output))
    assert closest(*found) <= LOGPROB_TOLERANCE


def test_o4_output_logprobs_switch_neither_chunks_nor_cache_off(tiny: Tiny) -> None:
    engine = engine_of(tiny("kimi_linear"), max_num_batched_tokens=16)
    largest = []
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: largest.append(plan.num_tokens) or execute(plan)
    for cached in (0, 64):
        (output,) = run(engine, [prompt(100)], greedy(4, logprobs=5))
        assert output.num_cached_tokens == cached
    assert max(largest) == 16


def schedules(folder: Path, dtype: str) -> list[tuple[Engine, list[list[int]]]]:
    """Return five ways to run the first prompt: engine, and the prompts that run with it."""
    asked, others = prompt(236), [prompt(30, 1), prompt(70, 2)]
    small = {"cache_tokens": 320, "max_num_seqs": 3}
    return [
        (engine_of(folder, dtype=dtype, max_num_batched_tokens=512), [asked]),
        (engine_of(folder, dtype=dtype, max_num_batched_tokens=64), [asked]),
        (engine_of(folder, dtype=dtype, max_num_batched_tokens=33, overlap=False), [asked, *others]),
        (engine_of(folder, dtype=dtype, **small), [asked, *others]),
        (engine_of(folder, dtype=dtype, max_num_batched_tokens=17, max_num_seqs=2), [asked, others[0]]),
    ]


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32", "qwen3_moe"])
def test_o6_in_fp32_five_schedules_of_256_tokens_give_the_same_ids(name: str, tiny: Tiny) -> None:
    for engine, prompts in schedules(tiny(name), "float32"):
        assert_solo(tiny(name), run(engine, prompts, greedy(20))[:1])


def mean_difference(one: list[float], other: list[float]) -> float:
    """Return the mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("name", [*HYBRIDS, "qwen3_moe"])
def test_o6_in_bf16_a_schedule_moves_less_than_the_format_itself(name: str, tiny: Tiny) -> None:
    # the stated tolerance: the mean error of the format's own rounding, measured against fp32
    asked = greedy(2, prompt_logprobs=0)
    exact = values(run(engine_of(tiny(name)), [prompt(236)], asked)[0])
    found = [values(run(engine, prompts, asked)[0]) for engine, prompts in schedules(tiny(name), "bfloat16")]
    rounding = mean_difference(found[0], exact)
    assert 0 < rounding < 0.1
    assert all(mean_difference(found[0], other) <= rounding for other in found[1:])
