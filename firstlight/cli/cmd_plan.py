"""plan: which body runs each operator, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import ModelFlags, OutputFlags, PlanFlags, limited
from firstlight.cli.output import SOFT, WAIT, Cell, Output
from firstlight.errors import EXIT_OK

if TYPE_CHECKING:
    from firstlight.plan.explain import MemoryEstimate, PlanRow
    from firstlight.plan.planner import Plan


def plan(
    model: ModelFlags,
    plan: PlanFlags,
    output: OutputFlags,
    explain: Annotated[
        bool, typer.Option("--explain", help="Each choice with its reason and what was rejected.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="N", help="Context of the memory estimate.")
    ] = None,
) -> int:
    """Which operator body runs each layer and stage, and why; memory and parallel layout."""
    from firstlight.plan.explain import fold, memory

    out = Output(output)
    declared = limited(model.declare(config_only=True), max_model_len)
    out.notices(declared.port.notices)
    made = plan.build(declared)
    out.model(model.model)
    if out.flags.json:
        out.json(made.to_dict())
        return EXIT_OK
    print_rows(out, fold(made, declared.arch), explain=explain)
    out.line()
    print_layout(out, made, memory(made, declared.arch))
    return EXIT_OK


def print_rows(out: Output, rows: tuple[PlanRow, ...], *, explain: bool) -> None:
    """Print the folded layers, a line per operator with explain."""
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        place: tuple[Cell, ...] = (row.place, row.pattern, ", ".join(row.stages))
        if not explain:
            cells.append((*place, by_body(row)))
            continue
        for op in row.ops:
            rejected = "; ".join(f"{no.impl}: {no.reason}" for no in op.rejected)
            cells.append((*place, f"{op.op}/{op.impl}", op.reason, (rejected, SOFT)))
            place = ("", "", "")
    header = ("layers", "what", "stages", "operator/body", "why", "rejected")
    out.table(cells, header=header if explain else (*header[:3], "body: operators"))


def by_body(row: PlanRow) -> str:
    """Return the operators of a row under the bodies that run them: "eager: linear, rope; absorbed: mla"."""
    bodies: dict[str, list[str]] = {}
    for op in row.ops:
        bodies.setdefault(op.impl, []).append(op.op)
    return "; ".join(f"{body}: {', '.join(ops)}" for body, ops in bodies.items())


def print_layout(out: Output, plan: Plan, memory: MemoryEstimate) -> None:
    """Print formats, parallel layout, what was refused, and memory."""
    from firstlight.plan.amounts import quantity

    formats = plan.precision
    axes = " ".join(f"{axis}={size}" for axis, size in plan.parallel.items())
    sequence = f"{quantity(memory.sequence_bytes, 'B')} per sequence of {memory.context:,} tokens"
    parts = f"{quantity(memory.cache_bytes_per_token, 'B')} per token"
    parts += f", {quantity(memory.state_bytes_per_sequence, 'B')} of state"
    rows: list[tuple[Cell, ...]] = [
        (
            "precision",
            f"backbone {formats.backbone} | kv {formats.kv_cache} | index {formats.index} | state {formats.state}",
        ),
        ("parallel", f"{axes} on {plan.device}, graph mode {'on' if plan.graph_mode else 'off'}"),
        ("memory", f"weights {quantity(memory.weight_bytes, 'B')}, {sequence} ({parts})"),
    ]
    rows += [("refused", (f"{refused.what}: {refused.reason}", WAIT)) for refused in plan.refused]
    if plan.unknown_keys:
        rows.append(("unread", (f"keys of config.json let pass: {', '.join(plan.unknown_keys)}", WAIT)))
    out.table(rows)
