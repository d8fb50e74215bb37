"""A Plan made readable: layers with the same bindings folded, what was rejected and why, what it weighs.

Also which bodies of an operator could run here at all. Text and layout are the caller's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from firstlight.ops.registry import Impl, Operator, OperatorTable
from firstlight.plan.planner import STAGES, Binding, Plan, Rejected
from firstlight.spec.arch import ArchSpec
from firstlight.spec.bind import BindContext
from firstlight.spec.cost import cost
from firstlight.spec.parts import fold_layers, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOp:
    """A body and why: a Binding without its place."""

    op: str
    impl: str
    reason: str
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Layers (none: outside the layers) that run the same bodies in these stages. pattern: what the layers are."""

    layers: tuple[int, ...]
    pattern: str
    stages: tuple[str, ...]
    ops: tuple[BoundOp, ...]

    @property
    def place(self) -> str:
        """The layers in folded form, "-" outside."""
        return ranges(self.layers) or "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes under a Plan. context: tokens that sequence_bytes counts; scratch pages and activations are not counted."""

    context: int
    weight_bytes: int
    cache_bytes_per_token: float
    state_bytes_per_sequence: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence of `context` tokens."""
        return int(self.cache_bytes_per_token * self.context) + self.state_bytes_per_sequence

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "sequence_bytes": self.sequence_bytes}


def fold(plan: Plan, arch: ArchSpec) -> tuple[PlanRow, ...]:
    """Return the rows of a Plan: outside the layers first, then layers in order of first appearance."""
    patterns = {index: pattern for pattern, layers in fold_layers(arch) for index in layers}
    places: list[int | None] = [None, *range(plan.num_layers)]
    bound = {place: tuple(_ops(plan.bindings, place, stage) for stage in STAGES) for place in places}
    groups: dict[tuple[bool, tuple[tuple[BoundOp, ...], ...], str], list[int]] = {}
    for place in places:
        key = (place is None, bound[place], "" if place is None else patterns.get(place, ""))
        groups.setdefault(key, []).extend([] if place is None else [place])
    rows = []
    for (outside, by_stage, pattern), layers in groups.items():
        name = "outside the layers" if outside else pattern
        rows += [
            PlanRow(layers=tuple(layers), pattern=name, stages=stages, ops=ops) for stages, ops in _stages(by_stage)
        ]
    return tuple(rows)


def _ops(bindings: Iterable[Binding], layer: int | None, stage: str) -> tuple[BoundOp, ...]:
    return tuple(
        BoundOp(op=b.op, impl=b.impl, reason=b.reason, rejected=b.rejected)
        for b in bindings
        if b.layer == layer and b.stage == stage
    )


def _stages(by_stage: tuple[tuple[BoundOp, ...], ...]) -> list[tuple[tuple[str, ...], tuple[BoundOp, ...]]]:
    merged: dict[tuple[BoundOp, ...], list[str]] = {}
    for stage, ops in zip(STAGES, by_stage, strict=True):
        merged.setdefault(ops, []).append(stage)
    return [(tuple(stages), ops) for ops, stages in merged.items() if ops]


def memory(plan: Plan, arch: ArchSpec, *, context: int | None = None) -> MemoryEstimate:
    """Return the memory of a model under a Plan. context None: the longest that the model takes."""
    context = context or arch.max_position_embeddings
    dtype = plan.precision.backbone
    total = cost(arch, context=context, dtype=dtype, caches=plan.precision.cache_dtypes()).total
    return MemoryEstimate(
        context=context,
        weight_bytes=total.weight_bytes,
        cache_bytes_per_token=total.cache_bytes_per_token,
        state_bytes_per_sequence=total.state_bytes_per_sequence,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyVerdict:
    """A body of an operator. refusals: stage -> why it cannot run here; empty where it can."""

    op: str
    summary: str
    impl: str
    target: str
    rank: int
    refusals: dict[str, str]

    @property
    def usable(self) -> bool:
        """True if some stage can use it."""
        return len(self.refusals) < len(STAGES)


def body_verdicts(table: OperatorTable, *, device: str = "cpu", dtype: str = "bfloat16") -> tuple[BodyVerdict, ...]:
    """Return every body of every operator, best rank first, and whether it can run here, whatever the model."""
    operators = [table[name] for name in table.names()]
    return tuple(_verdict(operator, impl, device, dtype) for operator in operators for impl in operator.impls)


def _verdict(operator: Operator, impl: Impl, device: str, dtype: str) -> BodyVerdict:
    refusals = {stage: _refusal(impl, BindContext(stage=stage, dtype=dtype, device=device)) for stage in STAGES}
    return BodyVerdict(
        op=operator.name,
        summary=operator.summary,
        impl=impl.name,
        target=impl.target,
        rank=impl.rank,
        refusals={stage: reason for stage, reason in refusals.items() if reason},
    )


def _refusal(impl: Impl, ctx: BindContext) -> str | None:
    if importlib.util.find_spec(impl.target.partition(":")[0]) is None:
        return f"{impl.target} is not installed"
    try:
        return impl.rejects(ctx)
    except AttributeError:
        # it asks about the noun it would serve, and here is none
        return "depends on the model: see firstlight plan MODEL --explain"
