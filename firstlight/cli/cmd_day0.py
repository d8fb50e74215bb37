"""day0: take a model apart, plan it, prove it, let it write, on one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import ModelFlags, OutputFlags, PlanFlags, RunFlags, limited
from firstlight.cli.output import BAD, GOOD, SOFT, WAIT, Cell, Output
from firstlight.errors import EXIT_CHECK_FAILED, EXIT_OK

if TYPE_CHECKING:
    from firstlight.engine.assemble import Declared
    from firstlight.plan.planner import Plan
    from firstlight.verify.day0 import Day0Options, Day0Report

STYLES = {"done": GOOD, "not yet": WAIT, "not applicable": SOFT}


def day0(
    model: ModelFlags,
    plan: PlanFlags,
    run: RunFlags,
    output: OutputFlags,
    reference: Annotated[
        str,
        typer.Option("--reference", metavar="NAME", help="transformers, ref, or auto: transformers if it knows MODEL."),
    ] = "auto",
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Tokens to compare over, as in verify.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="New tokens at most.")] = 32,
    report: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The page; ./firstlight-day0-MODEL.html by default."),
    ] = None,
) -> int:
    """Take a model apart, plan it, prove it equal to a reference, let it write: one page."""
    from firstlight.engine.sampling_params import SamplingParams
    from firstlight.verify.day0 import PROMPT, Day0Options
    from firstlight.verify.files import check_writable, write_report
    from firstlight.verify.html import render_day0

    out = Output(output)
    out.model(model.model)
    # before hours are spent on the proof
    SamplingParams(max_tokens=max_tokens, seed=run.seed)
    declared = limited(model.declare(), run.max_model_len)
    out.notices(declared.port.notices)
    made = plan.build(declared)
    out.refusals(made)
    path = report or Path(f"firstlight-day0-{re.sub(r'[^A-Za-z0-9._-]+', '-', declared.source.name)}.html")
    check_writable(path)
    options = Day0Options(
        reference=reference,
        num_tokens=tokens,
        seed=run.seed,
        prompt=PROMPT if prompt is None else prompt,
        max_tokens=max_tokens,
        model=model.model,
        flags=(*model.words(), *plan.words()),
    )
    found = watched(out, declared, made, options)
    write_report(path, render_day0(found))
    if out.flags.json:
        out.json({**found.to_dict(), "report": str(path)})
    else:
        print_report(out, found)
        out.line(f"report {path}")
    return EXIT_OK if found.passed else EXIT_CHECK_FAILED


def watched(out: Output, declared: Declared, plan: Plan, options: Day0Options) -> Day0Report:
    """Return the report, with bars while it is made."""
    from firstlight.plan.explain import memory
    from firstlight.verify.day0 import Progress, run_day0

    totals = {"layers compared": len(declared.arch.layers), "weights": memory(plan, declared.arch).weight_bytes}
    with out.bars(totals) as advance:
        layer, loaded = advance.values()
        return run_day0(declared, plan, options, Progress(layer=lambda index: layer(1), loaded=loaded))


def print_report(out: Output, report: Day0Report) -> None:
    """Print the mission's checklist, the verdict and the text."""
    rows: list[tuple[Cell, ...]] = []
    for step in report.steps:
        head: tuple[Cell, Cell] = (step.name, (step.status, STYLES[step.status]))
        for finding in step.findings:
            said = "" if finding.status == step.status else f" ({finding.status})"
            rows.append((*head, finding.topic + said, finding.evidence))
            head = ("", "")
    out.table(rows)
    proof, first = report.proof, report.proof.first_divergence
    out.line()
    out.line(f"reference {report.reference}: {report.reference_reason}")
    verdict = "equal" if report.passed else "NOT equal"
    worst = max((check.relative for check in proof.checks if check.tolerance), default=0.0)
    out.line(
        f"{verdict} to {proof.reference}: {len(proof.checks)} checks, greatest relative error {worst:.1e}",
        GOOD if report.passed else BAD,
    )
    if first is not None:
        out.line(f"first divergence {first.place}: {first.relative:.1e} where {first.tolerance:.0e} is allowed", BAD)
        out.line(f"repro  {report.repro}")
    out.line()
    out.stream(f"{report.written.prompt}{report.written.text}\n")
    out.line()
