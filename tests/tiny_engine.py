"""Engines over the tiny checkpoints in fp32, and the solo runs that their outputs are measured against.

A solo run takes a Runner and one sequence, without scheduler, prefix cache or neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from firstlight.engine.args import EngineArgs
from firstlight.engine.assemble import Declared, build_runner, declare
from firstlight.engine.build import build_engine
from firstlight.engine.core import Engine
from firstlight.engine.outputs import CompletionOutput, RequestOutput
from firstlight.engine.runner import Runner
from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.sequence import SequenceCache
from firstlight.plan.planner import Plan
from firstlight.quant.policy import PrecisionPolicy

NAMES = ("kimi_linear", "glm5_next", "nemotron_h", "deepseek_v32", "qwen3_moe")
HYBRIDS = ("kimi_linear", "glm5_next", "nemotron_h")
# below this gap of its two best logits a solo run itself may go either way
TIE = 1e-5
LOGPROB_TOLERANCE = 1e-4
SIZES = {"cache_tokens": 2048, "state_slots": 24, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}


@dataclass(frozen=True)
class Solo:
    """Greedy tokens, their log-probabilities, and the gap between the two best logits at each."""

    ids: list[int]
    logprobs: list[float]
    gaps: list[float]


@cache
def declared(folder: Path, dtype: str = "float32") -> tuple[Declared, Plan]:
    """Return a checkpoint taken apart, and its plan."""
    found = declare(str(folder))
    return found, found.plan(PrecisionPolicy(backbone=dtype))


def engine_of(folder: Path, *, dtype: str = "float32", **args: Any) -> Engine:
    """Return an engine over poisoned arenas; args: those of EngineArgs."""
    found, plan = declared(folder, dtype)
    return build_engine(found, plan, EngineArgs(**{"poison": True, **SIZES, **args}))[0]


@cache
def solo_runner(folder: Path, dtype: str = "float32") -> Runner:
    """Return a runner with room for one sequence."""
    found, plan = declared(folder, dtype)
    return build_runner(found, plan, num_tokens=1024)[0]


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return random ids that are no special tokens."""
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def solo(folder: Path, ids: Sequence[int], count: int) -> Solo:
    """Return `count` greedy tokens of a prompt run alone."""
    return _solo(folder, tuple(ids), count)


@cache
def _solo(folder: Path, ids: tuple[int, ...], count: int) -> Solo:
    runner, found = solo_runner(folder), Solo([], [], [])
    sequence, fed = SequenceCache(runner.pool.blocks), list(ids)
    try:
        for _ in range(count):
            logits_V = runner.run(sequence, fed)[0, :256]
            best = logits_V.topk(2).values
            fed = [int(logits_V.argmax())]
            found.ids.append(fed[0])
            found.gaps.append(float(best[0] - best[1]))
            found.logprobs.append(float(logits_V.log_softmax(0)[fed[0]]))
    finally:
        sequence.release()
    return found


def greedy(count: int = 8, **params: Any) -> SamplingParams:
    """Return parameters of a greedy run of exactly that many tokens, with log-probabilities."""
    asked = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 1, "detokenize": False, **params}
    return SamplingParams(**asked)


def check(engine: Engine) -> None:
    """Check the ledger of a live engine."""
    engine.runner.pool.check_ledger(engine.live_sequences(), engine.pinned_slots())


def drain(engine: Engine) -> None:
    """Step until nothing is left, checking the ledger after each step."""
    for _ in range(5000):
        if not engine.has_work:
            return
        engine.step()
        check(engine)
    raise AssertionError("not done after 5000 steps")


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[RequestOutput]:
    """Return the outputs of prompts that arrive together."""
    names = [engine.add(ids, params or greedy()) for ids in prompts]
    drain(engine)
    return [engine.pop(name) for name in names]


def assert_same(found: CompletionOutput, expected: Solo) -> None:
    """Compare an output with a solo run: ids up to a tie, log-probabilities closely."""
    assert found.finish_reason == "length", found.finish_reason
    assert len(found.token_ids) == len(expected.ids)
    assert found.logprobs is not None
    for place, (token, entries) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        if token != expected.ids[place]:
            assert expected.gaps[place] < TIE, f"token {place} is {token}, not {expected.ids[place]}"
            return
        difference = abs(entries[token].logprob - expected.logprobs[place])
        assert difference <= LOGPROB_TOLERANCE, f"log-probability of token {place} differs by {difference:.1e}"


def assert_solo(folder: Path, outputs: Sequence[RequestOutput]) -> None:
    """Compare every output with the solo run of its prompt."""
    for output in outputs:
        (found,) = output.outputs
        assert_same(found, solo(folder, output.prompt_token_ids, len(found.token_ids)))
