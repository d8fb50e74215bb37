"""The scheduler alone: schedule() and apply() for many decoding requests, with no model behind them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from firstlight.bench.report import Row
from firstlight.engine.assemble import Declared
from firstlight.engine.batch import BatchPlan, StepResult
from firstlight.engine.request import Request
from firstlight.engine.sampler import Sampled
from firstlight.engine.sampling_params import SamplingParams
from firstlight.engine.scheduler import Scheduler, SchedulerConfig
from firstlight.memory.blocks import Blocks
from firstlight.memory.prefix import Chain, PrefixCache
from firstlight.plan.planner import Plan

# different for each request, so that pages fill and checkpoints fall due at different steps
PROMPT_TOKENS = 16
SLOTS_PER_REQUEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """num_seqs decoding requests over num_steps steps."""

    case: str
    num_seqs: int = 256
    num_steps: int = 1000


def scheduling(declared: Declared, plan: Plan, steps: Steps) -> list[Row]:
    """Return one row: the median of schedule() plus apply(), with the caches that the model declares."""
    scheduler = filled(declared, plan, steps)
    while any(row.n > 1 for row in advance(scheduler)[0].rows) or scheduler.waiting:
        pass
    timed = [advance(scheduler) for _ in range(steps.num_steps)]
    times = sorted(seconds * 1000 for _, seconds in timed)
    return [
        Row(
            op="schedule_apply",
            case=f"{steps.case} {steps.num_seqs} decode rows",
            ms=median(times),
            correct=all(len(plan.rows) == steps.num_seqs == plan.num_tokens for plan, _ in timed),
            more={"p99_ms": times[int(0.99 * (len(times) - 1))], "num_steps": steps.num_steps},
        )
    ]


def filled(declared: Declared, plan: Plan, steps: Steps) -> Scheduler:
    """Return a scheduler with all requests waiting, and memory for every token that they will have."""
    count = steps.num_seqs
    decls = [layer.mixer.declare(plan.precision.cache_dtypes()) for layer in declared.arch.layers]
    # some steps are spent on the prompts
    max_tokens = steps.num_steps + 2 * count
    total = PROMPT_TOKENS + count + max_tokens
    blocks = Blocks(decls, num_tokens=count * (total + 512), num_slots=count * SLOTS_PER_REQUEST)
    config = SchedulerConfig(max_num_seqs=count, max_num_batched_tokens=max(2048, count))
    scheduler = Scheduler(config, blocks, PrefixCache(blocks))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for number in range(count):
        ids = [number] * (PROMPT_TOKENS + number)
        chain = Chain(blocks.unit_tokens)
        most = len(ids) + max_tokens
        scheduler.add(Request(id=number, ids=ids, num_prompt=len(ids), params=params, chain=chain, max_total=most))
    return scheduler


def advance(scheduler: Scheduler) -> tuple[BatchPlan, float]:
    """Return the next plan, and the seconds that planning it and taking a result in took."""
    began = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    sampled = [Sampled(7) if row.samples else None for row in plan.rows]
    result = StepResult(sampled, [[] for _ in plan.rows])
    ran = time.perf_counter()
    scheduler.apply(plan, result)
    return plan, planned - began + time.perf_counter() - ran
