"""verify: a checkpoint beside a reference, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import ModelFlags, OutputFlags, PlanFlags, RunFlags, limited, number_range
from firstlight.cli.output import BAD, GOOD, Cell, Output, json_text
from firstlight.engine.args import EngineArgs
from firstlight.errors import EXIT_CHECK_FAILED, EXIT_OK, FirstlightError

if TYPE_CHECKING:
    from firstlight.verify.report import Check, VerifyReport
    from firstlight.verify.run import VerifyOptions


def verify(
    model: ModelFlags,
    plan: PlanFlags,
    run: RunFlags,
    output: OutputFlags,
    reference: Annotated[
        str, typer.Option("--reference", metavar="NAME", help="transformers, or ref: our own reference operators.")
    ] = "transformers",
    layers: Annotated[str | None, typer.Option("--layers", metavar="RANGE", help="0-7, or 3. All by default.")] = None,
    until: Annotated[
        int | None, typer.Option("--until", metavar="LAYER", help="Stop after this layer: --layers 0-LAYER.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="By default beyond every top-k, chunk and page.")
    ] = None,
    tol: Annotated[
        float | None, typer.Option("--tol", metavar="X", help="Relative error allowed; by default that of fp32.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    report: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the report as JSON."),
    ] = None,
) -> int:
    """Compare every layer, state, selection and the logits with a reference; name the first divergence."""
    from firstlight.verify.files import check_writable, write_report
    from firstlight.verify.run import verify as compare
    from firstlight.verify.summary import repro

    out = Output(output)
    for path in filter(None, (html, report)):
        check_writable(path)
    declared = limited(model.declare(), run.max_model_len)
    made = plan.build(declared)
    out.refusals(made)
    options = options_of(reference, layers_of(layers, until), tokens, tol, run.seed)
    out.model(model.model)
    out.notices(declared.port.notices)
    if plan.dtype not in ("auto", "float32"):
        out.warn(f"--dtype {plan.dtype} has no effect here: operators are compared in float32")
    with out.bar(f"against {reference}", len(options.layers or declared.arch.layers)) as advance:
        found = compare(declared, made, options, lambda index: advance(1))
    first = found.first_divergence
    flags = (*model.words(), *plan.words(), *(() if tol is None else ("--tol", str(tol))), *seed_words(run.seed))
    again = repro(found, first, model=model.model, reference=reference, flags=flags) if first else ""
    if report is not None:
        write_report(report, json_text({**found.to_dict(), "repro": again}) + "\n")
    if html is not None:
        from firstlight.verify.html import render_verify

        write_report(html, render_verify(found, repro=again))
    if out.flags.json:
        out.json({**found.to_dict(), "repro": again})
    else:
        print_report(out, found, again)
    return EXIT_OK if found.passed else EXIT_CHECK_FAILED


def layers_of(layers: str | None, until: int | None) -> str | None:
    """Return the range that --layers or --until asks for. Raises: FirstlightError if both do."""
    if until is None:
        return layers
    if layers is not None:
        raise FirstlightError(
            "--until and --layers are both given",
            where=f"--until {until} --layers {layers}",
            why=f"--until {until} is --layers 0-{until}",
            fix="give one of them",
        )
    return f"0-{until}"


def seed_words(seed: int) -> tuple[str, ...]:
    """Return the flag of a seed that is not the usual one."""
    return () if seed == RunFlags().seed else ("--seed", str(seed))


def options_of(reference: str, layers: str | None, tokens: int | None, tol: float | None, seed: int) -> VerifyOptions:
    """Return the options that flags ask for. Raises: FirstlightError."""
    from firstlight.verify.run import TOLERANCE, VerifyOptions

    EngineArgs(seed=seed)
    if tol is not None and not 0 < tol < float("inf"):
        raise FirstlightError(
            f"--tol {tol} is out of range",
            where="--tol",
            why="it is a relative error above 0",
            fix=f"--tol {TOLERANCE}",
        )
    return VerifyOptions(
        reference=reference,
        num_tokens=tokens,
        layers=None if layers is None else number_range(layers, flag="--layers"),
        tolerance=TOLERANCE if tol is None else tol,
        seed=seed,
    )


def print_report(out: Output, report: VerifyReport, again: str) -> None:
    """Print a line per layer, all that failed, and the first divergence."""
    from firstlight.verify.summary import layer_rows

    first = report.first_divergence
    rows: list[tuple[Cell, ...]] = []
    for row in layer_rows(report):
        shown = row.failed or (row.worst,)
        rows += [check_cells(check, row.recall if check.recall is None else check.recall, first) for check in shown]
    out.table(rows, header=("layer", "module", "max err", "rel err", "tol", "recall", ""), right=(2, 3, 4, 5))
    if first is not None:
        at = f" at position {first.position}" if first.position is not None else ""
        out.line()
        allowed = f", relative error {first.relative:.1e} where {first.tolerance:.0e} is allowed{at}"
        out.line(f"first divergence  {first.place} ({first.kind}){allowed if first.numeric else ''}", BAD)
        told = (("  against", first.reference), ("  note", first.note), ("  hint", first.hint))
        out.table([(name, text) for name, text in told if text])
        out.line(f"  repro  {again}")
    for notice in report.notices:
        out.note(f"notice: {notice}")
    if report.unknown_keys:
        out.line(f"keys of config.json let pass: {', '.join(report.unknown_keys)}")
    verdict = "equal" if report.passed else "NOT equal"
    good = sum(check.passed for check in report.checks)
    counts = f"{good} of {len(report.checks)} checks in {len(report.layers)} layers, {report.num_tokens} tokens"
    out.line(f"{verdict} to {report.reference}: {counts}, {report.seconds:.1f} s", GOOD if report.passed else BAD)


def check_cells(check: Check, recall: float | None, first: Check | None) -> tuple[Cell, ...]:
    """Return the row of a check."""
    verdict: Cell = ("ok", GOOD) if check.passed else ("FAIL  <- first divergence" if check is first else "FAIL", BAD)
    layer = "-" if check.layer is None else str(check.layer)
    numbers = (f"{check.error:.1e}", f"{check.relative:.1e}", f"{check.tolerance:.0e}") if check.numeric else ("-",) * 3
    return layer, check.module or "(whole layer)", *numbers, "-" if recall is None else f"{recall:.3f}", verdict
