"""ops: what can be computed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import OutputFlags
from firstlight.cli.output import GOOD, WAIT, Cell, Output
from firstlight.errors import EXIT_OK

if TYPE_CHECKING:
    from firstlight.plan.explain import BodyVerdict


def ops(
    output: OutputFlags,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One operator. All by default.")] = None,
) -> int:
    """Operators and their bodies: usable here, or why not."""
    from firstlight.ops.registry import operator_table
    from firstlight.plan.explain import body_verdicts

    out, table = Output(output), operator_table()
    wanted = table[name].name if name else None
    found = [verdict for verdict in body_verdicts(table) if wanted in (None, verdict.op)]
    if out.flags.json:
        out.json([{**asdict(verdict), "usable": verdict.usable} for verdict in found])
        return EXIT_OK
    rows: list[tuple[Cell, ...]] = []
    last = ""
    for verdict in found:
        head = (verdict.op, verdict.summary) if verdict.op != last else ("", "")
        rows.append((head[0], verdict.impl, said(verdict), head[1]))
        last = verdict.op
    out.table(rows, header=("operator", "body", "here", "computes"))
    return EXIT_OK


def said(verdict: BodyVerdict) -> Cell:
    """Return whether a body is usable, and where not why."""
    if not verdict.refusals:
        return "usable", GOOD
    text = "; ".join(f"not in {stage}: {reason}" for stage, reason in verdict.refusals.items())
    return (f"usable, {text}", GOOD) if verdict.usable else (text, WAIT)
