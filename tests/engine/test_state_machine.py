"""Random lives of an engine: arrivals, forks, aborts, deadlines, priorities and faults over arenas of any size.

After every step the ledger is checked; every output is compared with what its prompt gives alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tagged_engine
import tiny_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tagged_engine import ATTENTION, HYBRID, RECURRENT, continuation, kv

from firstlight.engine.batch import BatchPlan
from firstlight.engine.core import Engine
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampling_params import SamplingParams
from firstlight.spec.caches import CacheDecl

Tiny = Callable[[str], Path]
# pages of different sizes: one of 16 tokens, one of 128
UNEVEN = (CacheDecl(pages=(kv(16, "small"), kv(128, "large"))), HYBRID[1])
DECLS = {"hybrid": HYBRID, "attention": ATTENTION, "recurrent": RECURRENT, "uneven": UNEVEN}
QUIET = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "print_blob": False,
    "suppress_health_check": list(HealthCheck),
}


class EngineMachine(RuleBasedStateMachine):
    """What is common: requests come and go; `expected` and `make` are the engine's own."""

    engine: Engine
    longest = 200

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__()
        self.totals = totals
        self.live: dict[str, dict[str, Any]] = {}
        self.prompts: list[list[int]] = []

    def submit(self, ids: list[int], data: st.DataObject) -> None:
        """Queue a prompt with drawn parameters; one that can never fit must be refused and leave no trace."""
        count = data.draw(st.integers(1, 12))
        priority = data.draw(st.integers(0, 2))
        blocks = self.engine.runner.pool.blocks
        fits = blocks.can_ever_hold(len(ids) + count - 1)
        params = self.params(ids, count, data)
        if not fits:
            with pytest.raises(ValueError, match="the arenas hold"):
                self.engine.add(ids, params, priority=priority)
            return
        name = self.engine.add(ids, params, priority=priority)
        self.live[name] = {"aborted": False}
        self.prompts.append(ids)

    def params(self, ids: list[int], count: int, data: st.DataObject) -> SamplingParams:
        """Return greedy parameters for a prompt."""
        raise NotImplementedError

    def compare(self, output: RequestOutput) -> None:
        """Compare a finished output with the solo run."""
        raise NotImplementedError

    def ids(self, length: int, seed: int) -> list[int]:
        """Return a prompt."""
        raise NotImplementedError

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.submit(self.ids(data.draw(st.integers(1, self.longest)), data.draw(st.integers(0, 3))), data)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.prompts:
            trunk = data.draw(st.sampled_from(self.prompts))
            kept = data.draw(st.integers(0, len(trunk)))
            tail = self.ids(data.draw(st.integers(1, 40)), data.draw(st.integers(4, 6)))
            self.submit([*trunk[:kept], *tail][: self.longest], data)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.live[name]["aborted"] |= not self.engine.groups[name].is_finished
            self.engine.abort(name)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.ledger()
        self.collect()

    @invariant()
    def ledger(self) -> None:
        if hasattr(self, "engine"):
            tagged_engine.check(self.engine)

    def collect(self) -> None:
        """Take what has ended."""
        for name in [name for name in self.live if self.engine.groups[name].is_finished]:
            life, error = self.live.pop(name), self.engine.output(name).error
            output = self.engine.pop(name)
            if life["aborted"]:
                assert output.outputs[0].finish_reason == "abort"
            elif error:
                assert "planted" in error, error
            else:
                self.compare(output)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        tagged_engine.drain(self.engine)
        self.collect()
        assert not self.live
        pool = self.engine.runner.pool
        pool.check_ledger([])
        for blocks in (pool.blocks.slots, *(role.pool for role in pool.blocks.roles.values())):
            assert blocks.num_available == blocks.total - 1
        assert not self.engine.scheduler.computing
        self.engine.close()
        scheduler, hits = self.engine.scheduler, self.engine.prefix.counters.hits
        self.totals.update(steps=self.engine.num_steps, preemptions=scheduler.num_preemptions, hits=hits)


class TaggedMachine(EngineMachine):
    """Over memory that knows what it holds; operators fail now and then."""

    def __init__(self, decls: str, totals: Counter[str]) -> None:
        super().__init__(totals)
        self.decls = DECLS[decls]
        self.executed = self.fails_at = 0

    @initialize(
        pages=st.integers(3, 16),
        slots=st.integers(1, 8),
        budget=st.sampled_from([8, 16, 40, 64, 100]),
        every=st.sampled_from([64, 128, 4096]),
        overlap=st.booleans(),
        prefix=st.booleans(),
    )
    def make(self, pages: int, slots: int, budget: int, every: int, overlap: bool, prefix: bool) -> None:
        self.engine = tagged_engine.tagged_engine(
            self.decls,
            num_tokens=64 * pages,
            num_slots=slots,
            max_num_batched_tokens=budget,
            checkpoint_tokens=every,
            overlap=overlap,
            prefix=prefix,
            before=self.before,
        )

    def before(self, plan: BatchPlan) -> None:
        """Fail the step if a fault is planted."""
        self.executed += 1
        if self.executed == self.fails_at:
            raise RuntimeError("planted")

    def ids(self, length: int, seed: int) -> list[int]:
        return [(i * (2 * seed + 1) + seed) % 50 for i in range(length)]

    def params(self, ids: list[int], count: int, data: st.DataObject) -> SamplingParams:
        stops = [continuation(ids, 5)[-1]] if data.draw(st.booleans()) else []
        return SamplingParams(temperature=0, max_tokens=count, stop_token_ids=stops, detokenize=False)

    def compare(self, output: RequestOutput) -> None:
        params = self.engine_params[output.request_id]
        expected = continuation(output.prompt_token_ids, params.max_tokens or 0, params.stop_token_ids)
        assert list(output.outputs[0].token_ids) == expected

    def collect(self) -> None:
        self.engine_params = {name: group.params for name, group in self.engine.groups.items()}
        super().collect()

    @rule()
    def plant_a_fault(self) -> None:
        # the next plan to be submitted, whatever the worker does in the meantime
        self.fails_at = self.engine.num_steps + (self.engine._running is not None) + 1

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        # as if memory had run out
        if self.engine.scheduler.running:
            self.engine.scheduler._preempt(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @rule()
    def forget_the_cache(self) -> None:
        blocks = self.engine.runner.pool.blocks
        for pool in (blocks.slots, *(role.pool for role in blocks.roles.values())):
            pool.clear_cache()


class TinyMachine(EngineMachine):
    """Over a tiny checkpoint."""

    longest = 140

    def __init__(self, folder: Path, totals: Counter[str]) -> None:
        super().__init__(totals)
        self.folder = folder

    @initialize(
        pages=st.integers(3, 6),
        slots=st.integers(2, 8),
        budget=st.sampled_from([16, 64, 200]),
        overlap=st.booleans(),
    )
    def make(self, pages: int, slots: int, budget: int, overlap: bool) -> None:
        sizes = {"cache_tokens": 64 * pages, "state_slots": slots, "max_num_batched_tokens": budget}
        self.engine = tiny_engine.engine_of(self.folder, overlap=overlap, checkpoint_tokens=64, **sizes)

    def ids(self, length: int, seed: int) -> list[int]:
        # few lengths: solo runs are kept
        return tiny_engine.prompt(-(-length // 20) * 20, seed)[: self.longest]

    def params(self, ids: list[int], count: int, data: st.DataObject) -> SamplingParams:
        return tiny_engine.greedy(8)

    def submit(self, ids: list[int], data: st.DataObject) -> None:
        if len(ids) + 7 <= self.engine.runner.pool.blocks.most_tokens():
            self.live[self.engine.add(ids, self.params(ids, 8, data))] = {"aborted": False}
            self.prompts.append(ids)

    def compare(self, output: RequestOutput) -> None:
        tiny_engine.assert_solo(self.folder, [output])


@pytest.mark.parametrize("decls", DECLS)
def test_no_life_of_an_engine_leaks_or_mixes_requests_up(decls: str) -> None:
    totals: Counter[str] = Counter()
    many = settings(**QUIET, max_examples=40, stateful_step_count=50)
    run_state_machine_as_test(partial(TaggedMachine, decls, totals), settings=many)
    # the lives were full ones
    assert totals["steps"] > 500
    assert totals["preemptions"] and totals["hits"]


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next", "deepseek_v32"])
def test_no_life_of_an_engine_changes_what_a_model_answers(name: str, tiny: Tiny) -> None:
    totals: Counter[str] = Counter()
    few = settings(**QUIET, max_examples=6, stateful_step_count=30)
    run_state_machine_as_test(partial(TinyMachine, tiny(name), totals), settings=few)
    assert totals["steps"] > 100
    assert totals["preemptions"] and totals["hits"]
