"""Runner: executes exactly the Plan it is given. T tokens of all rows, R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.layers.context import LayerCache, Ops, StepContext
from firstlight.layers.decoder import Decoder
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache
from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Rows
from firstlight.plan.planner import STAGES, Plan


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens ids of a sequence from its committed length on."""

    sequence: SequenceCache
    ids: Sequence[int]


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
    """A model, its Plan and its memory."""

    def __init__(self, model: Decoder, plan: Plan, table: OperatorTable, pool: CachePool) -> None:
        self.model, self.plan, self.pool = model, plan, pool
        self.bound = BoundPlan(plan, table)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], *, all_logits: bool = False) -> Tensor:
        """Return fp32 logits [R, V] of each row's last token, or [T, V] of all; pages and states are written.

        Raises: MemoryError if a sequence cannot grow; nothing is written then.
        """
        for row in rows:
            row.sequence.reserve(row.sequence.committed + len(row.ids))
        meta = Rows.of([(row.sequence.committed, len(row.ids)) for row in rows], self.plan.device)
        ids_T = torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64, device=self.plan.device)
        step = self.bound.step(meta, self.pool.views([row.sequence for row in rows]))
        hidden_TH = self.model(ids_T, step)
        for row in rows:
            row.sequence.commit(len(row.ids))
        last_R = meta.offsets[1:].long() - 1
        read = hidden_TH if all_logits else hidden_TH[last_R]
        return self.model.logits(read, step.model_ops).float()
