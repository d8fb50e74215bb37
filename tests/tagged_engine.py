"""An engine without weights: its runner tags every page entry and state with what belongs there and checks it on read.

The next token is a hash of the whole history as read back from memory, so a page or a state of somebody else, or a
stale one, either trips a check or changes the output. Costs microseconds per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from firstlight.engine.batch import BatchPlan, PlanRow, StepResult
from firstlight.engine.core import Engine, EngineConfig
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampler import Sampled, TopLogprob
from firstlight.engine.sampling_params import SamplingParams
from firstlight.engine.scheduler import SchedulerConfig
from firstlight.memory.arena import CachePool
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken

VOCAB = 50
PRIME = 2**31 - 1
STATE = PerSequence(name="state", shape=(2,), dtype="float64", kind="recurrent")
GREEDY = {"temperature": 0.0, "detokenize": False}


def kv(page_tokens: int = 64, name: str = "kv") -> PerToken:
    """Return pages that hold the position and id of each token."""
    return PerToken(name=name, shape=(2,), dtype="float64", page_tokens=page_tokens)


HYBRID = (CacheDecl(pages=(kv(),)), CacheDecl(states=(STATE,), grid=64))
ATTENTION = (CacheDecl(pages=(kv(),)),)
RECURRENT = (CacheDecl(states=(STATE,), grid=64),)


def digest(ids: Sequence[int], value: int = 1) -> int:
    """Return the hash of a history, continued from that of its beginning."""
    for token in ids:
        value = (value * 1103 + token + 7) % PRIME
    return value


def continuation(prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """Return what the tagged engine must answer: computed from the ids alone."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(digest(ids) % VOCAB)
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


class TaggedRunner:
    """Stands in for a Runner. before: called with each plan before anything is read; may raise or sleep."""

    def __init__(self, pool: CachePool, before: Callable[[BatchPlan], None] | None = None) -> None:
        self.pool, self.before = pool, before
        self.model = SimpleNamespace(arch=SimpleNamespace(vocab_size=VOCAB))
        self.plans: list[list[tuple[int, int, int]]] = []
        self.last: dict[int, int] = {}
        # tokens whose logits are to come out broken, by (request, position)
        self.broken: set[tuple[int, int]] = set()

    def execute(self, plan: BatchPlan) -> StepResult:
        """Run a step as Runner does."""
        if self.before is not None:
            self.before(plan)
        self.plans.append([(row.request.id, row.start, row.n) for row in plan.rows])
        for source, target in plan.copies:
            self.pool.copy_state(source, target)
        found = [self._row(row) for row in plan.rows]
        self.last = {row.request.id: one.token for row, (one, _) in zip(plan.rows, found, strict=True) if one}
        return StepResult([one for one, _ in found], [entries for _, entries in found])

    def _row(self, row: PlanRow) -> tuple[Sampled | None, list[tuple[TopLogprob, ...]]]:
        request, end = row.request, row.start + row.n
        ids = list(request.ids[row.start : min(end, row.known)])
        ids += [self.last[request.id]] if end > row.known else []
        void = row.epoch != request.epoch
        for name, arena in self.pool.pages.items():
            (plane,) = arena.planes.values()
            table = torch.tensor(row.hold.pages[name], dtype=torch.int64)
            flat, size = plane.view(-1, 2), plane.shape[1]
            at = torch.arange(end)
            slots = table[at // size] * size + at % size
            # a flat list converts fast
            expected = torch.stack([at, torch.tensor([*request.ids[: row.start], *ids])], dim=1).double()
            flat[slots[row.start :]] = expected[row.start :]
            if not void and not torch.equal(flat[slots], expected):
                assert ended_meanwhile(row), f"request {request.id}: pages of {name} hold another's"
        value = self._advance(row, ids, void) if self.pool.states else digest([*request.ids[: row.start], *ids])
        token = None
        if row.samples:
            broken = (request.id, end) in self.broken
            token = Sampled(-1, error="broken") if broken else Sampled(value % VOCAB)
        following = request.ids[row.start + 1 : min(end + 1, request.num_prompt)]
        asked = request.params.prompt_logprobs is not None
        entries = [(TopLogprob(t, -float(row.start + i), 1),) for i, t in enumerate(following)] if asked else []
        return token, entries

    def _advance(self, row: PlanRow, ids: Sequence[int], void: bool) -> int:
        (plane,) = self.pool.states["state"].planes.values()
        slot = row.hold.slot
        count, value = plane[slot].tolist() if row.start else (0.0, 1.0)
        if count != row.start:
            assert void or ended_meanwhile(row), f"request {row.request.id}: state of {count} tokens, not {row.start}"
            return 0
        now = int(value)
        for position, token in enumerate(ids, start=row.start + 1):
            now = digest([token], now)
            if row.export is not None and row.export[0] == position:
                plane[row.export[1]] = torch.tensor([position, now]).double()
        plane[slot] = torch.tensor([row.start + len(ids), now]).double()
        return now


def ended_meanwhile(row: PlanRow) -> bool:
    """Return whether the row's request is ended by the planning thread, which gives memory back before it says so."""
    for _ in range(100):
        if row.epoch != row.request.epoch:
            return True
        time.sleep(0.005)
    return False


def tagged_engine(
    decls: Sequence[CacheDecl] = HYBRID,
    *,
    num_tokens: int = 64 * 16,
    num_slots: int = 8,
    max_model_len: int = 4096,
    prefix: bool = True,
    overlap: bool = True,
    before: Callable[[BatchPlan], None] | None = None,
    **limits: int,
) -> Engine:
    """Return an Engine over tagged memory, poisoned when given back. limits: those of SchedulerConfig."""
    pool = CachePool(decls, num_tokens=num_tokens, num_slots=num_slots, poison=True)
    config = EngineConfig(
        max_model_len=max_model_len,
        scheduler=SchedulerConfig(**{"max_num_seqs": min(8, num_slots), "max_num_batched_tokens": 64, **limits}),
        enable_prefix_caching=prefix,
        overlap=overlap,
    )
    runner: Any = TaggedRunner(pool, before)
    return Engine(runner, None, config)


def drain(engine: Engine, *, limit: int = 2000) -> int:
    """Step until nothing is left, checking the ledger after each; return the steps taken."""
    for count in range(limit):
        if not engine.has_work:
            return count
        engine.step()
        check(engine)
    raise AssertionError(f"not done after {limit} steps")


def check(engine: Engine) -> None:
    """Check that exactly what live requests and steps in flight hold is held."""
    engine.runner.pool.check_ledger(engine.live_sequences(), engine.pinned_slots())


def generate(engine: Engine, *prompts: Sequence[int], **params: Any) -> list[RequestOutput]:
    """Return the outputs of prompts that arrive together."""
    asked = SamplingParams(**{**GREEDY, "max_tokens": 8, **params})
    names = [engine.add(prompt, asked) for prompt in prompts]
    drain(engine)
    return [engine.pop(name) for name in names]


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    """Return the ids of one continuation."""
    return list(output.outputs[index].token_ids)


def slow(plan: BatchPlan) -> None:
    """Let the planning thread run on before the step begins to read."""
    time.sleep(0.001)
