"""Runner: executes exactly the Plan it is given. T tokens of all rows, R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from firstlight.engine.batch import BatchPlan, PlanRow, StepResult
from firstlight.engine.logits import SampleRow
from firstlight.engine.sampler import Sampled, TopLogprob, prompt_logprobs, sample
from firstlight.errors import FirstlightError
from firstlight.layers.context import LayerCache, Ops, StepContext
from firstlight.layers.decoder import Decoder
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import Hold, SequenceCache
from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Export, Rows
from firstlight.plan.planner import STAGES, Plan


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens ids of a sequence from position start on. export: see Rows."""

    hold: Hold
    start: int
    ids: Sequence[int]
    export: Export = None


class BoundPlan:
    """The bodies of a Plan, loaded: what a StepContext is made of."""

    def __init__(self, plan: Plan, table: OperatorTable) -> None:
        layers: list[int | None] = [None, *range(plan.num_layers)]
        self.ops = {(stage, layer): Ops(plan.bodies(table, layer, stage)) for stage in STAGES for layer in layers}
        self.num_layers = plan.num_layers

    def step(self, rows: Rows, caches: tuple[LayerCache, ...]) -> StepContext:
        """Return the context of one step; the stage of the Plan follows from the rows."""
        stage = "decode" if rows.is_decode else "prefill"
        layers = tuple(self.ops[stage, index] for index in range(self.num_layers))
        return StepContext(rows, self.ops[stage, None], layers, caches)


class Runner:
    """A model, its Plan and its memory. vocab_size: ids that may be sampled, where the head is padded beyond it."""

    def __init__(
        self, model: Decoder, plan: Plan, table: OperatorTable, pool: CachePool, *, vocab_size: int | None = None
    ) -> None:
        self.model, self.plan, self.pool = model, plan, pool
        self.vocab_size = vocab_size or model.arch.vocab_size
        self.bound = BoundPlan(plan, table)
        # what the last step sampled, by request: a row planned before its result was known starts from it
        self.last: dict[int, int] = {}

    @torch.inference_mode()
    def run(self, sequence: SequenceCache, ids: Sequence[int], *, all_logits: bool = False) -> Tensor:
        """Append ids to one sequence; return fp32 logits [1, V] of the last, or [T, V] of all.

        Raises: MemoryError if the sequence cannot grow; nothing is written then.
        """
        sequence.reserve(sequence.committed + len(ids))
        hold = sequence.hold(sequence.committed + len(ids))
        hidden_TH, step = self.forward([Row(hold, sequence.committed, ids)])
        sequence.committed = hold.num_tokens
        return self.model.logits(hidden_TH if all_logits else hidden_TH[-1:], step.model_ops).float()

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, StepContext]:
        """Return the normed hidden states [T, H] of all rows, and the step; pages and states are written."""
        device = self.plan.device
        spans = [(row.start, len(row.ids)) for row in rows]
        exports = [row.export for row in rows] if any(row.export for row in rows) else ()
        meta = Rows.of(spans, device, exports=exports)
        ids_T = torch.tensor(list(chain.from_iterable(row.ids for row in rows)), dtype=torch.int64, device=device)
        step = self.bound.step(meta, self.pool.views([row.hold for row in rows]))
        return self.model(ids_T, step), step

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> StepResult:
        """Run a step: state copies, one forward over the ragged rows, logits where asked, sampling."""
        for source, target in plan.copies:
            self.pool.copy_state(source, target)
        rows = [Row(row.hold, row.start, self._ids(row), row.export) for row in plan.rows]
        hidden_TH, step = self.forward(rows)
        ends, end = [], 0
        for row in rows:
            end += len(row.ids)
            ends.append(end)
        asked = [i for i, row in enumerate(plan.rows) if row.samples]
        sampled: list[Sampled | None] = [None] * len(plan.rows)
        if asked:
            logits_RV = self.model.logits(hidden_TH[[ends[i] - 1 for i in asked]], step.model_ops)
            for i, one in zip(asked, sample(logits_RV, [self._sample_row(plan.rows[i]) for i in asked]), strict=True):
                sampled[i] = one
        scored: list[list[tuple[TopLogprob, ...]]] = []
        for i, (planned, end) in enumerate(zip(plan.rows, ends, strict=True)):
            try:
                scored.append(self._prompt_logprobs(planned, hidden_TH[end - planned.n : end], step))
            except FirstlightError as error:
                # broken logits end their own request only
                scored.append([])
                sampled[i] = Sampled(-1, error=error.what)
        # a row without a token ends its request; what runs for it in the meantime only has to be an id
        results = zip(plan.rows, sampled, strict=True)
        self.last = {row.request.id: max(one.token, 0) for row, one in results if one is not None}
        return StepResult(sampled, scored)

    def _ids(self, row: PlanRow) -> Sequence[int]:
        end = row.start + row.n
        if end <= row.known:
            return row.request.ids[row.start : end]
        return [*row.request.ids[row.start : row.known], self.last[row.request.id]]

    def _sample_row(self, row: PlanRow) -> SampleRow:
        request = row.request
        extra = self.last[request.id] if row.start + row.n > row.known else None
        return SampleRow(
            params=request.params,
            ids=request.ids,
            num_prompt=request.num_prompt,
            known=row.known,
            extra=extra,
            eos_ids=request.eos_ids,
            seed=request.seed,
            vocab_size=self.vocab_size,
        )

    def _prompt_logprobs(self, row: PlanRow, hidden_TH: Tensor, step: StepContext) -> list[tuple[TopLogprob, ...]]:
        """Return the entries of the prompt tokens that follow those of this row, empty unless asked for."""
        request, count = row.request, row.request.params.prompt_logprobs
        following = request.ids[row.start + 1 : min(row.start + row.n + 1, request.num_prompt)]
        if count is None or not following:
            return []
        logits_TV = self.model.logits(hidden_TH[: len(following)], step.model_ops)[:, : self.vocab_size]
        return prompt_logprobs(logits_TV.float(), following, count)
