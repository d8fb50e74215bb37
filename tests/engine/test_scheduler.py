"""The scheduler alone: plans and results as plain data, no model and no tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from firstlight.engine.batch import BatchPlan, PlanRow, StepResult
from firstlight.engine.request import Request, Status
from firstlight.engine.sampling_params import SamplingParams
from firstlight.engine.scheduler import Scheduler, SchedulerConfig
from firstlight.memory.blocks import Blocks
from firstlight.memory.prefix import Chain, PrefixCache
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken

ATTENTION = CacheDecl(pages=(PerToken(name="kv", shape=(1,), dtype="float32"),))
STATE = PerSequence(name="state", shape=(1,), dtype="float32", kind="recurrent")
HYBRID = CacheDecl(pages=ATTENTION.pages, states=(STATE,))


def make(
    decl: CacheDecl = ATTENTION, *, pages: int = 32, slots: int = 16, prefix: bool = False, **limits: int
) -> Scheduler:
    """Return a scheduler over so many pages of 64 tokens."""
    blocks = Blocks([decl], num_tokens=64 * pages, num_slots=slots)
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits})
    return Scheduler(config, blocks, PrefixCache(blocks, enabled=prefix))


class Arrivals:
    """Makes requests with rising ids."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.count = scheduler, 0

    def __call__(self, length: int, max_tokens: int = 16, *, first: int | None = None, **fields: Any) -> Request:
        ids = [self.count if first is None else first, *range(1000, 1000 + length - 1)]
        request = Request(
            id=self.count,
            ids=ids,
            num_prompt=length,
            params=SamplingParams(temperature=0, max_tokens=max_tokens),
            chain=Chain(self.scheduler.blocks.unit_tokens),
            max_total=length + max_tokens,
            **fields,
        )
        self.scheduler.add(request)
        self.count += 1
        return request


def result_of(plan: BatchPlan) -> StepResult:
    """Return a token for every row that samples."""
    sampled: list[Any] = [SimpleNamespace(token=7, error=None) if row.samples else None for row in plan.rows]
    return StepResult(sampled, [[] for _ in plan.rows])


def finish_done(scheduler: Scheduler, rows: Iterable[PlanRow]) -> None:
    """End the requests that have all their tokens, as the engine does."""
    for row in rows:
        if len(row.request.ids) >= row.request.max_total:
            scheduler.finish(row.request, "length")


def step(scheduler: Scheduler) -> BatchPlan:
    """Plan a step and apply it."""
    plan = scheduler.schedule()
    finish_done(scheduler, scheduler.apply(plan, result_of(plan)))
    return plan


def shape(plan: BatchPlan) -> list[tuple[int, int, int]]:
    """Return (request, start, n) of each row."""
    return [(row.request.id, row.start, row.n) for row in plan.rows]


def overlapped(scheduler: Scheduler, steps: int) -> list[list[tuple[int, int, int]]]:
    """Return what is planned when each step is planned before the one before is applied."""
    seen, plan = [], scheduler.schedule()
    for _ in range(steps):
        seen.append(shape(plan))
        following = scheduler.schedule()
        finish_done(scheduler, scheduler.apply(plan, result_of(plan)))
        plan = following
    scheduler.apply(plan, result_of(plan))
    return seen


def held(scheduler: Scheduler) -> int:
    """Return the pages that requests hold."""
    return scheduler.blocks.roles["kv"].pool.num_held


def test_importing_the_scheduler_pulls_no_torch() -> None:
    code = "import sys, firstlight.engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_prompt_never_keeps_decodes_waiting() -> None:
    scheduler = make(max_num_batched_tokens=32)
    add = Arrivals(scheduler)
    short = [add(4, 40) for _ in range(3)]
    step(scheduler)
    long = add(500)
    for _ in range(20):
        plan = step(scheduler)
        assert [row.n for row in plan.rows if row.request in short] == [1, 1, 1]
        assert [row.n for row in plan.rows if row.request is long] in ([29], [500 - 29 * 17], [1])
        assert plan.num_tokens <= 32


def test_decodes_never_starve_a_prompt() -> None:
    # as many tokens as sequences: each decode leaves one for the prompt
    scheduler = make(max_num_seqs=4, max_num_batched_tokens=4)
    add = Arrivals(scheduler)
    for _ in range(3):
        add(1, 200)
    step(scheduler)
    prompt = add(30)
    for _ in range(30):
        step(scheduler)
    assert prompt.num_output == 1


@pytest.mark.parametrize("budget", [8, 9, 64, 100])
def test_no_step_exceeds_the_budgets_and_every_token_is_planned_once(budget: int) -> None:
    scheduler = make(max_num_batched_tokens=budget)
    add = Arrivals(scheduler)
    requests = [add(length, 5) for length in (1, 3, 64, 65, 7, 130, 8, 9, 2, 77)]
    seen: dict[int, int] = {}
    while scheduler.has_work:
        plan = step(scheduler)
        assert 0 < plan.num_tokens <= budget
        assert len({row.request.id for row in plan.rows}) == len(plan.rows) <= 8
        for row in plan.rows:
            assert row.start == seen.get(row.request.id, 0)
            seen[row.request.id] = row.start + row.n
    # the last token is never read back
    assert seen == {request.id: request.max_total - 1 for request in requests}
    assert held(scheduler) == 0


def test_a_step_mixes_prompts_and_decodes() -> None:
    scheduler = make()
    add = Arrivals(scheduler)
    add(5)
    step(scheduler)
    add(20)
    add(10)
    assert shape(scheduler.schedule()) == [(0, 5, 1), (1, 0, 20), (2, 0, 10)]


def test_a_prompt_is_cut_where_the_budget_ends_and_only_its_last_piece_samples() -> None:
    scheduler = make(max_num_batched_tokens=8)
    Arrivals(scheduler)(20)
    rows = [step(scheduler).rows[0] for _ in range(4)]
    assert [(row.start, row.n) for row in rows] == [(0, 8), (8, 8), (16, 4), (20, 1)]
    assert [row.samples for row in rows] == [False, False, True, True]


def test_an_overlapped_decode_runs_in_every_step() -> None:
    scheduler = make()
    request = Arrivals(scheduler)(5, 6)
    assert overlapped(scheduler, 6) == [[(0, 0, 5)], *[[(0, 5 + i, 1)] for i in range(5)]]
    assert request.num_output == 6
    assert held(scheduler) == 0


@pytest.mark.parametrize(("pages", "slots"), [(1, 8), (8, 1)], ids=["no page", "no slot"])
def test_a_request_that_cannot_be_admitted_waits_untouched(pages: int, slots: int) -> None:
    scheduler = make(HYBRID, pages=pages, slots=slots)
    add = Arrivals(scheduler)
    add(50, 10)
    step(scheduler)
    waiting = add(30, 10)
    before = held(scheduler), scheduler.blocks.slots.num_available
    for _ in range(3):
        step(scheduler)
        assert (held(scheduler), scheduler.blocks.slots.num_available) == before
        assert (waiting.status, waiting.sequence, waiting.planned) == (Status.WAITING, None, 0)
    while scheduler.has_work:
        step(scheduler)
    assert waiting.num_output == 10
    assert held(scheduler) == 0


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler = make(pages=2)
    add = Arrivals(scheduler)
    add(100, 29)
    with pytest.raises(ValueError, match=r"129 tokens; the arenas hold 128"):
        add(100, 30)
    assert len(scheduler.waiting) == 1


def test_the_last_to_arrive_is_preempted_and_comes_back_first() -> None:
    scheduler = make(pages=4)
    add = Arrivals(scheduler)
    first, second, third, later = add(60, 80), add(60, 80), add(60, 80), add(64, 4)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert scheduler.waiting[0] is third
    assert (third.num_preemptions, third.planned, third.sequence) == (1, 0, None)
    ended = []
    while scheduler.has_work:
        step(scheduler)
        ended += [r for r in (first, second, third, later) if r.is_finished and r not in ended]
    assert ended[0] is first
    assert [r.num_output for r in (first, second, third, later)] == [80, 80, 80, 4]
    assert first.num_preemptions == 0
    assert held(scheduler) == 0


def test_the_first_request_always_moves_on() -> None:
    scheduler = make(pages=3)
    add = Arrivals(scheduler)
    first = add(10, 150)
    for _ in range(5):
        add(50, 100)
    for count in range(1, 151):
        step(scheduler)
        assert first.num_output == count


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "overlapped"])
def test_a_preempted_request_is_not_admitted_before_it_can_go_on(ahead: bool) -> None:
    scheduler = make(pages=3, max_num_seqs=2, max_num_batched_tokens=256)
    add = Arrivals(scheduler)
    requests = [add(60, 60), add(60, 60)]
    plan = scheduler.schedule()
    while scheduler.has_work:
        following = scheduler.schedule() if ahead else None
        finish_done(scheduler, scheduler.apply(plan, result_of(plan)))
        plan = following if following is not None else scheduler.schedule()
    assert [r.num_output for r in requests] == [60, 60]
    assert scheduler.num_preemptions == 1


def test_lower_priority_numbers_go_first_and_equals_by_arrival() -> None:
    scheduler = make(max_num_seqs=2)
    add = Arrivals(scheduler)
    for priority in (1, 0, 1, -1, 0):
        add(3, 3, priority=priority)
    order: list[int] = []
    while scheduler.has_work:
        order += [row.request.id for row in step(scheduler).rows if row.start == 0]
    assert order == [3, 1, 4, 0, 2]


def test_the_least_urgent_is_preempted_whenever_it_came() -> None:
    scheduler = make(pages=2)
    add = Arrivals(scheduler)
    early, urgent = add(60, 40, priority=1), add(60, 40, priority=0)
    while scheduler.has_work:
        step(scheduler)
    assert (early.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert early.num_output == urgent.num_output == 40


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    scheduler = make(max_num_seqs=1)
    add = Arrivals(scheduler)
    running, waiting, patient = add(5, deadline=10.0), add(5, deadline=10.0), add(5, deadline=11.0)
    step(scheduler)
    assert scheduler.expire(9.9) == []
    assert scheduler.expire(10.0) == [running, waiting]
    assert {r.finish_reason for r in (running, waiting)} == {"timeout"}
    assert held(scheduler) == 0
    assert scheduler.waiting == [patient]


@pytest.mark.parametrize("when", range(8))
def test_a_request_may_end_at_any_time(when: int) -> None:
    scheduler = make(HYBRID, prefix=True, max_num_batched_tokens=32)
    request = Arrivals(scheduler)(100, 4)
    plans: list[BatchPlan] = []
    for _ in range(when):
        plans.append(scheduler.schedule())
        if len(plans) > 1:
            done = plans.pop(0)
            scheduler.apply(done, result_of(done))
    scheduler.finish(request, "abort")
    scheduler.finish(request, "abort")
    assert not scheduler.has_work
    count = len(request.ids)
    for plan in plans:
        assert scheduler.apply(plan, result_of(plan)) == []
    assert len(request.ids) == count
    scheduler.blocks.roles["kv"].pool.check({})
    scheduler.blocks.slots.check({})


def test_a_cancelled_plan_is_planned_again() -> None:
    scheduler = make(HYBRID, prefix=True)
    add = Arrivals(scheduler)
    add(10, 3)
    step(scheduler)
    add(90, 3)
    plan = scheduler.schedule()
    scheduler.cancel(plan)
    scheduler.blocks.roles["kv"].pool.check({})
    scheduler.blocks.slots.check({})
    assert shape(scheduler.schedule()) == [(0, 0, 11), (1, 0, 53)]


def test_a_row_without_a_token_publishes_nothing() -> None:
    scheduler = make(HYBRID, prefix=True, max_num_batched_tokens=128)
    request = Arrivals(scheduler)(100, 3)
    plan = scheduler.schedule()
    broken: Any = SimpleNamespace(token=-1, error="broken")
    (row,) = scheduler.apply(plan, StepResult([broken], [[]]))
    scheduler.finish(row.request, "error")
    assert len(request.ids) == 100
    assert scheduler.prefix.lookup(request.ids, Chain(64)).length == 0
    scheduler.blocks.slots.check({})


@pytest.mark.parametrize("decl", [ATTENTION, HYBRID], ids=["attention", "hybrid"])
def test_a_prefix_that_is_being_computed_is_waited_for_and_shared(decl: CacheDecl) -> None:
    scheduler = make(decl, prefix=True)
    add = Arrivals(scheduler)
    one, two, other = add(200, first=5), add(210, first=5), add(30, first=6)
    starts = {}
    while scheduler.has_work:
        for row in step(scheduler).rows:
            starts.setdefault(row.request.id, row.start)
    assert starts == {0: 0, 1: 192, 2: 0}
    assert (one.num_cached, two.num_cached, other.num_cached) == (0, 192, 0)
    assert scheduler.computing == set()


def test_who_waited_for_a_prefix_runs_when_its_maker_ends() -> None:
    scheduler = make(prefix=True)
    add = Arrivals(scheduler)
    maker, second = add(300, first=5), add(300, first=5)
    step(scheduler)
    assert second.status is Status.WAITING
    scheduler.finish(maker, "abort")
    step(scheduler)
    assert second.status is Status.RUNNING


def test_each_lookup_is_counted_once_however_long_the_request_waits() -> None:
    scheduler = make(prefix=True, max_num_seqs=2, max_num_batched_tokens=16)
    add = Arrivals(scheduler)
    for first in (1, 1, 2):
        add(100, first=first)
    while scheduler.has_work:
        step(scheduler)
    counters = scheduler.prefix.counters
    assert (counters.lookups, counters.hits, counters.asked_tokens, counters.hit_tokens) == (3, 1, 300, 64)


def test_a_checkpoint_without_a_slot_is_skipped_and_counted_once() -> None:
    scheduler = make(HYBRID, prefix=True, slots=1)
    Arrivals(scheduler)(65, 2)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.prefix.counters.checkpoints_skipped == 1
    assert scheduler.prefix.counters.checkpoints == 0


def test_at_most_one_checkpoint_falls_into_a_row() -> None:
    scheduler = make(HYBRID, prefix=True, slots=16, max_num_batched_tokens=1000, checkpoint_tokens=128)
    Arrivals(scheduler)(700, 2)
    exports = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        exports += [row.export[0] for row in plan.rows if row.export]
        finish_done(scheduler, scheduler.apply(plan, result_of(plan)))
    assert exports == [128, 256, 384, 512, 640]


def test_the_same_arrivals_give_the_same_plans() -> None:
    def life() -> list[Any]:
        scheduler = make(HYBRID, pages=6, slots=5, prefix=True, max_num_batched_tokens=40)
        add, seen = Arrivals(scheduler), []
        for number in range(30):
            add(1 + number * 37 % 150, 1 + number % 9, first=number % 4, priority=number % 3)
            seen.append(shape(step(scheduler)))
        while scheduler.has_work:
            seen.append(shape(step(scheduler)))
        return seen

    assert life() == life()


def test_a_step_that_could_not_hold_every_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)


def test_a_request_that_waits_for_a_prefix_lets_others_go_first() -> None:
    scheduler = make(prefix=True, max_num_batched_tokens=200)
    arrive = Arrivals(scheduler)
    owner = arrive(150, first=5)
    assert [row.request for row in scheduler.schedule().rows] == [owner]
    same, other = arrive(150, first=5), arrive(20)
    assert [row.request for row in scheduler.schedule().rows] == [owner, other]
    assert same.status is Status.WAITING
