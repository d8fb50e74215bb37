"""The engine: requests in, tokens out. Schedules, runs, and turns tokens into outputs, one step at a time.

With overlap, the next step is planned while the current one runs in a worker thread; results are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from firstlight.engine.batch import BatchPlan, PlanRow, StepResult
from firstlight.engine.outputs import (
    Delta,
    FinishReason,
    Logprobs,
    OutputProcessor,
    RequestOutput,
    logprobs_by_id,
)
from firstlight.engine.request import Request
from firstlight.engine.runner import Runner
from firstlight.engine.sampler import Sampled, TopLogprob
from firstlight.engine.sampling_params import SamplingParams
from firstlight.engine.scheduler import Scheduler, SchedulerConfig
from firstlight.engine.submission import check_request, check_service, resolved_seed
from firstlight.errors import FirstlightError
from firstlight.memory.prefix import Chain, PrefixCache
from firstlight.memory.sequence import SequenceCache
from firstlight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """max_model_len: tokens of prompt and output together. overlap: plan a step while the one before runs."""

    max_model_len: int
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    enable_prefix_caching: bool = True
    overlap: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """News of one continuation of a request."""

    request_id: str
    index: int
    delta: Delta


@dataclass(slots=True, eq=False)
class Group:
    """A request as the user sees it: n continuations of one prompt."""

    id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float
    members: list[Request] = field(default_factory=list)
    outputs: list[OutputProcessor] = field(default_factory=list)
    prompt_entries: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    first_token_s: float | None = None
    last_token_s: float = 0.0
    error: str = ""

    @property
    def is_finished(self) -> bool:
        """True once every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class Engine:
    """Scheduler, prefix cache and Runner. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.runner, self.tokenizer, self.config = runner, tokenizer, config
        blocks = runner.pool.blocks
        self.prefix = PrefixCache(blocks, enabled=config.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler, blocks, self.prefix)
        self.groups: dict[str, Group] = {}
        self.owner: dict[int, tuple[Group, int]] = {}
        self.num_steps = self.num_tokens = self._next_id = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="firstlight-step") if config.overlap else None
        self._running: tuple[BatchPlan, Future[StepResult | Exception]] | None = None
        self._news: list[Update] = []
        self._closed = False
        self.eos_ids = frozenset(tokenizer.eos_ids if tokenizer else ())

    @property
    def has_work(self) -> bool:
        """True while a request has not ended or a step is running."""
        return self.scheduler.has_work or self._running is not None or bool(self._news)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
    ) -> str:
        """Queue a request and return its id. deadline_s: seconds from now after which it ends. salt: shares no
        cached prefix with requests of another salt.

        Raises: FirstlightError or ValueError naming the parameter and its limit; nothing is queued then.
        """
        check_service(priority, deadline_s, salt)
        most = self.check(prompt_ids, params)
        number, now = self._next_id, time.monotonic()
        group = Group(request_id or f"request-{number}", prompt, tuple(prompt_ids), params, now)
        if group.id in self.groups:
            raise ValueError(f"request_id {group.id!r} is in use")
        # everything that can be refused comes before the first request is queued
        group.outputs = [OutputProcessor(self.tokenizer, params) for _ in range(params.n)]
        for index in range(params.n):
            request = Request(
                id=number + index,
                ids=list(prompt_ids),
                num_prompt=len(prompt_ids),
                params=params,
                chain=Chain(self.runner.pool.blocks.unit_tokens, salt),
                eos_ids=self.eos_ids,
                seed=resolved_seed(params, self.config.seed, number, index),
                priority=priority,
                deadline=None if deadline_s is None else now + deadline_s,
                max_total=most,
            )
            self.scheduler.add(request)
            group.members.append(request)
            self.owner[request.id] = (group, index)
        self._next_id += params.n
        self.groups[group.id] = group
        return group.id

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Return the most tokens that prompt and output may have together. Raises: FirstlightError, as `add` would."""
        if self._closed:
            raise FirstlightError("the engine is closed", why="close() ends it for good", fix="make a new one")
        vocab_size, limit = self.runner.model.arch.vocab_size, self.config.max_model_len
        most = check_request(prompt_ids, params, vocab_size, limit, self.eos_ids)
        return self._fitting(len(prompt_ids), most) if params.max_tokens is None else most

    def _fitting(self, num_prompt: int, most: int) -> int:
        """Return how many tokens there is room for in the arenas, at most `most`; the prompt has to fit anyway."""
        room = self.runner.pool.blocks.most_tokens()
        return most if room is None else min(most, max(room, num_prompt) + 1)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; unknown ids are ignored, it may just have ended."""
        group = self.groups.get(request_id)
        for request in group.members if group else ():
            self._end(request, "abort")

    def step(self) -> list[Update]:
        """Run or finish one step and return the news. Does nothing when there is no work."""
        for late in self.scheduler.expire(time.monotonic()):
            self._end(late, "abort")
        if self._worker is None:
            plan = self.scheduler.schedule()
            if plan.rows:
                self._take(plan, self._execute(plan))
        else:
            self._overlapped_step(self._worker)
        news, self._news = self._news, []
        if not self.has_work:
            self.runner.pool.check_ledger([])
        return news

    def output(self, request_id: str) -> RequestOutput:
        """Return a request as it is now. A finished one is forgotten by `pop`."""
        group = self.groups[request_id]
        scored: tuple[Logprobs | None, ...] | None = None
        if group.params.prompt_logprobs is not None:
            scored = (None, *(logprobs_by_id(entries, self.tokenizer) for entries in group.prompt_entries))
        return RequestOutput(
            request_id=group.id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_ids,
            outputs=tuple(output.completion(index) for index, output in enumerate(group.outputs)),
            finished=group.is_finished,
            prompt_logprobs=scored,
            num_cached_tokens=group.members[0].num_cached,
            metrics=self._metrics(group),
            error=group.error,
        )

    def pop(self, request_id: str) -> RequestOutput:
        """Return a request and forget it; it is ended first if it still runs."""
        self.abort(request_id)
        found = self.output(request_id)
        group = self.groups.pop(request_id)
        for request in group.members:
            del self.owner[request.id]
        self._news = [update for update in self._news if update.request_id != request_id]
        return found

    def metrics(self) -> dict[str, int]:
        """Return counters since the start, and what is held and cached now, in pages, slots and bytes."""
        pool, blocks = self.runner.pool, self.runner.pool.blocks
        found = {
            "steps": self.num_steps,
            "computed_tokens": self.num_tokens,
            "requests_waiting": len(self.scheduler.waiting),
            "requests_running": len(self.scheduler.running),
            "preemptions": self.scheduler.num_preemptions,
            **{f"prefix_{name}": value for name, value in asdict(self.prefix.counters).items()},
            "state_slots_held": blocks.slots.num_held,
            "state_slots_cached": blocks.slots.num_cached,
            "state_checkpoint_bytes": blocks.slots.num_cached * pool.bytes_per_slot,
            "cache_bytes": pool.bytes,
        }
        for name, role in blocks.roles.items():
            found |= {f"{name}_pages_held": role.pool.num_held, f"{name}_pages_cached": role.pool.num_cached}
        return found

    def live_sequences(self) -> list[SequenceCache]:
        """Return the memory of every running request."""
        return [request.sequence for request in self.scheduler.running if request.sequence is not None]

    def pinned_slots(self) -> list[int]:
        """Return the slots that the running step holds beside the live ones: checkpoints it reads or writes."""
        if self._running is None:
            return []
        plan, _ = self._running
        exported = (row.export[1] for row in plan.rows if row.export is not None)
        return [*(source for source, _ in plan.copies), *exported]

    def close(self) -> None:
        """End everything and wait for the running step; nothing can be added afterwards."""
        self._closed = True
        try:
            for request_id in list(self.groups):
                self.abort(request_id)
            while self._running is not None:
                self.step()
        finally:
            if self._worker is not None:
                self._worker.shutdown()

    def _overlapped_step(self, worker: ThreadPoolExecutor) -> None:
        if self._running is None:
            plan = self.scheduler.schedule()
            if not plan.rows:
                return
            self._running = (plan, worker.submit(self._execute, plan))
        plan, future = self._running
        following = self.scheduler.schedule()
        result = future.result()
        self._running = None
        failed = isinstance(result, Exception)
        if following.rows and not failed:
            self._running = (following, worker.submit(self._execute, following))
        self._take(plan, result)
        if failed:
            # after the requests of the failed step have ended, or those in both plans would only be put back
            self.scheduler.cancel(following)

    def _execute(self, plan: BatchPlan) -> StepResult | Exception:
        # whatever an operator does wrong belongs to the requests of this step, not to the engine
        try:
            return self.runner.execute(plan)
        except Exception as error:
            return error

    def _take(self, plan: BatchPlan, result: StepResult | Exception) -> None:
        self.num_steps += 1
        if isinstance(result, Exception):
            message = f"{type(result).__name__}: {result}"
            self.scheduler.fail(plan)
            for row in plan.rows:
                if row.epoch == row.request.epoch:
                    self._fail(row.request, message)
            return
        self.num_tokens += plan.num_tokens
        for row, sampled, entries in self._counted(plan, result):
            group, index = self.owner[row.request.id]
            if entries and index == 0:
                # by position: a preempted request computes its prompt again
                group.prompt_entries[row.start : row.start + len(entries)] = entries
            if sampled is None:
                continue
            if sampled.error:
                self._fail(row.request, sampled.error)
                continue
            group.last_token_s = time.monotonic() - group.arrival
            if group.first_token_s is None:
                group.first_token_s = group.last_token_s
            delta = group.outputs[index].push(sampled.token, sampled)
            self._news.append(Update(group.id, index, delta))
            if delta.finish_reason is not None:
                self.scheduler.finish(row.request, delta.finish_reason)
            elif len(row.request.ids) >= row.request.max_total:
                self._end(row.request, "length")

    def _counted(
        self, plan: BatchPlan, result: StepResult
    ) -> list[tuple[PlanRow, Sampled | None, list[tuple[TopLogprob, ...]]]]:
        of_row = {id(row): entry for row, *entry in zip(plan.rows, result.sampled, result.prompt_logprobs, strict=True)}
        return [(row, *of_row[id(row)]) for row in self.scheduler.apply(plan, result)]  # type: ignore[misc]

    def _fail(self, request: Request, message: str) -> None:
        group, _ = self.owner[request.id]
        group.error = message
        self._end(request, "error")

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        group, index = self.owner[request.id]
        if group.outputs[index].finish_reason is None:
            self._news.append(Update(group.id, index, group.outputs[index].finish(reason)))

    def _metrics(self, group: Group) -> dict[str, float]:
        found = {"num_preemptions": float(sum(request.num_preemptions for request in group.members))}
        if group.first_token_s is not None:
            found |= {"first_token_s": group.first_token_s, "last_token_s": group.last_token_s}
        return found
