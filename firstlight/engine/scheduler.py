"""The scheduler: which tokens of which requests run in the next step. Pure Python; deterministic for given arrivals.

A step may be planned while the one before still runs: rows then take their input token from it. `apply` is the only
place where a result changes anything, and it takes results in the order of the plans.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from firstlight.engine.batch import BatchPlan, PlanRow, StepResult
from firstlight.engine.request import Request, Status
from firstlight.memory.blocks import Blocks
from firstlight.memory.prefix import Hit, PrefixCache
from firstlight.memory.sequence import SequenceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. checkpoint_tokens: a state checkpoint is kept every so many tokens."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    checkpoint_tokens: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "a step must hold a token of every running sequence"
            )


NOTHING = Hit()


class Scheduler:
    """Waiting and running requests over Blocks and a PrefixCache."""

    def __init__(self, config: SchedulerConfig, blocks: Blocks, prefix: PrefixCache) -> None:
        self.config, self.blocks, self.prefix = config, blocks, prefix
        # checkpoints are found by the hashes of whole units
        self.checkpoint_tokens = -(-config.checkpoint_tokens // blocks.unit_tokens) * blocks.unit_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        # hashes of units that a running request computes and has not published: others wait for them
        self.computing: set[bytes] = set()

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises: ValueError if it could never fit, even alone."""
        # the last token is never read back
        if not self.blocks.can_ever_hold(request.max_total - 1):
            raise ValueError(
                f"prompt and max_tokens need memory for {request.max_total - 1} tokens; "
                f"the arenas hold {self.blocks.most_tokens()}"
            )
        insort(self.waiting, request, key=Request.order)

    def finish(self, request: Request, reason: str) -> None:
        """End a request at any time and give back what it holds; what is in flight for it becomes void."""
        if request.is_finished:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._release(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed, and return them."""
        late = [r for r in (*self.running, *self.waiting) if r.deadline is not None and now >= r.deadline]
        for request in late:
            self.finish(request, "timeout")
        return late

    def schedule(self) -> BatchPlan:
        """Return the next step: a token of every decoding request first, then prompts, then new requests.

        The plan is empty if nothing can run before a result is applied.
        """
        plan = BatchPlan()
        budget = self.config.max_num_batched_tokens
        prompts = []
        for request in list(self.running):
            left = request.num_tokens - request.planned
            if left < 1 or request.status is not Status.RUNNING:
                continue
            if left > 1:
                prompts.append(request)
            elif self._is_wanted(request) and self._grow(request):
                plan.rows.append(self._chunk(request, 1))
                budget -= 1
        for request in prompts:
            if budget and request.status is Status.RUNNING:
                row = self._chunk(request, budget)
                plan.rows.append(row)
                budget -= row.n
        for request in list(self.waiting):
            if not budget or len(self.running) == self.config.max_num_seqs:
                break
            hit = self._lookup(request)
            if hit is None:
                continue
            if not self._admit(request, hit, plan):
                break
            row = self._chunk(request, budget)
            plan.rows.append(row)
            budget -= row.n
        return plan

    def apply(self, plan: BatchPlan, result: StepResult) -> list[PlanRow]:
        """Take a step's result in; return the rows that count, in order. Sampled tokens are appended to their requests.

        Whether a request ends is for the caller to say (`finish`).
        """
        counted = []
        for row, sampled in zip(plan.rows, result.sampled, strict=True):
            request = row.request
            if row.epoch != request.epoch:
                self._drop_export(row)
                continue
            sequence, end = request.sequence, row.start + row.n
            assert sequence is not None, "a row that counts belongs to a running request"
            sequence.committed = end
            if row.samples:
                request.in_flight -= 1
                assert sampled is not None, "a row that reaches the end has a sampled token"
                if sampled.error is None:
                    request.ids.append(sampled.token)
            if sampled is not None and sampled.error is not None:
                # what led to broken logits is not to be found by others
                self._drop_export(row)
                counted.append(row)
                continue
            if end // self.blocks.unit_tokens != row.start // self.blocks.unit_tokens:
                self.prefix.publish_pages(request.ids, request.chain, sequence.pages, row.start, end)
                self.computing.difference_update(request.chain.hashes[: end // self.blocks.unit_tokens])
            if row.export is not None:
                self.prefix.publish_state(request.ids, request.chain, *row.export)
                self._drop_export(row)
            counted.append(row)
        self._unpin(plan)
        return counted

    def fail(self, plan: BatchPlan) -> None:
        """Take back what a step that went wrong had been given beside its rows; the caller ends its requests."""
        for row in plan.rows:
            self._drop_export(row)
        self._unpin(plan)

    def cancel(self, plan: BatchPlan) -> None:
        """Void a plan that will not run: its requests wait again and lose what the plan had given them."""
        for row in plan.rows:
            self._drop_export(row)
            if row.epoch == row.request.epoch and row.request.status is Status.RUNNING:
                self._preempt(row.request)
        self._unpin(plan)

    def _is_wanted(self, request: Request) -> bool:
        """False if the token in flight is the last that the request may have."""
        return request.num_tokens < request.max_total

    def _row(self, request: Request, n: int, export: tuple[int, int] | None = None) -> PlanRow:
        sequence = request.sequence
        assert sequence is not None, "a running request has a sequence"
        start = request.planned
        samples = start + n == request.num_tokens
        hold = sequence.hold(start + n)
        row = PlanRow(request, hold, start, n, len(request.ids), samples, request.epoch, export)
        request.planned = start + n
        request.in_flight += samples
        return row

    def _chunk(self, request: Request, budget: int) -> PlanRow:
        """Return the next piece of at most budget tokens, cut so that at most one checkpoint falls into it."""
        start = request.planned
        end = min(request.num_tokens, start + budget)
        inside = self._wanted(request, start, end) if self.blocks.has_states else []
        if not inside:
            # nearly every row, and in a large batch hundreds of them
            return self._row(request, end - start)
        if len(inside) > 1:
            end = inside[0]
        return self._row(request, end - start, self._export(request, inside[0]))

    def _wanted(self, request: Request, start: int, end: int) -> list[int]:
        """Return the positions in (start, end] at which a state should be kept, ascending."""
        every = self.checkpoint_tokens
        if end - start == 1:
            # decoding rows come here, hundreds in a step
            return [end] if end % every == 0 or end in request.checkpoints else []
        regular = range((start // every + 1) * every, end + 1, every)
        return sorted({*regular, *(p for p in request.checkpoints if start < p <= end)})

    def _export(self, request: Request, position: int) -> tuple[int, int] | None:
        """Return (position, slot) for a checkpoint, None if the state is kept already or there is no slot."""
        if not self.prefix.enabled:
            return None
        if position <= len(request.ids) and self.prefix.has_state(request.ids, request.chain, position):
            return None
        if not self.blocks.slots.can_allocate(1):
            self.prefix.counters.checkpoints_skipped += 1
            return None
        return position, self.blocks.slots.allocate(1)[0]

    def _drop_export(self, row: PlanRow) -> None:
        """Let go of the checkpoint's slot: published it stays findable, unpublished it is free."""
        if row.export is not None:
            self.blocks.slots.release([row.export[1]])
            row.export = None

    def _unpin(self, plan: BatchPlan) -> None:
        self.blocks.slots.release([source for source, _ in plan.copies])
        plan.copies = []

    def _reuses(self, request: Request) -> bool:
        """False for a request that needs the logits of its whole prompt."""
        return self.prefix.enabled and request.params.prompt_logprobs is None

    def _lookup(self, request: Request) -> Hit | None:
        """Return what the prefix cache has for a request; None if a running request computes what it still needs:
        it waits then, to share it, and others may go first."""
        if not self._reuses(request):
            return NOTHING
        hit = self.prefix.lookup(request.ids, request.chain)
        return hit if self.computing.isdisjoint(self._ahead(request, hit)) else None

    def _ahead(self, request: Request, hit: Hit) -> list[bytes]:
        """Return the hashes of the units behind a hit that the request computes and could share; a lookup always
        leaves the last token out."""
        unit = self.blocks.unit_tokens
        shared = slice(hit.length // unit, (len(request.ids) - 1) // unit)
        return request.chain.hashes[shared] if self._reuses(request) else []

    def _admit(self, request: Request, hit: Hit, plan: BatchPlan) -> bool:
        """Move a waiting request to the running ones, with memory for all its tokens; False if there is not enough."""
        # the first token it makes has a place too: one admitted without would be the next to be preempted
        needed = min(len(request.ids) + 1, request.max_total - 1)
        sequence = SequenceCache.admit(self.blocks, hit, needed)
        if sequence is None and hit.slot is not None and not self.running:
            # the checkpoint takes the slot that the live state needs
            hit = NOTHING
            sequence = SequenceCache.admit(self.blocks, hit, needed)
        if sequence is None:
            return False
        if self._reuses(request):
            self.prefix.count(len(request.ids), hit)
        self.waiting.remove(request)
        if hit.slot is not None:
            plan.copies.append((hit.slot, sequence.slot))
        request.sequence, request.planned, request.status = sequence, hit.length, Status.RUNNING
        if not request.num_preemptions:
            request.num_cached = hit.length
        unit = self.blocks.unit_tokens
        request.checkpoints = sorted({(len(request.ids) - 1) // unit * unit, hit.fork} - {0})
        self.computing.update(self._ahead(request, hit))
        insort(self.running, request, key=Request.order)
        return True

    def _grow(self, request: Request) -> bool:
        """Make room for one more token, preempting later requests if need be; False if the request itself had to go."""
        sequence, needed = request.sequence, request.planned + 1
        assert sequence is not None, "a running request has a sequence"
        if needed <= sequence.capacity:
            return True
        while not sequence.can_reserve(needed):
            # rows are planned in this order, so the last one has none in the plan yet
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        sequence.reserve(needed)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's memory; it waits, in its old place, to be computed again or from a checkpoint."""
        self.running.remove(request)
        self._release(request)
        request.status, request.planned = Status.WAITING, 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=Request.order)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.computing.difference_update(request.chain.hashes)
            request.sequence.release()
            request.sequence = None
        request.epoch += 1
        request.in_flight = 0
