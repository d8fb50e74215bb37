"""port: draft a port of an unknown model, list what is left of it, report on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import OutputFlags
from firstlight.cli.output import BAD, GOOD, WAIT, Output, json_text
from firstlight.errors import EXIT_CHECK_FAILED, EXIT_OK, FirstlightError

if TYPE_CHECKING:
    from firstlight.port.draft import Draft
    from firstlight.port.status import Status

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder with config.json and safetensors, or a hub id.")]
PortFile = Annotated[Path, typer.Argument(metavar="FILE.py", help="The port.")]
Against = Annotated[str, typer.Option("--reference", metavar="NAME", help="transformers, ref, or none.")]


def new(
    model: Model,
    output: OutputFlags,
    file: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.py", help="Where the port is written.")],
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> int:
    """Write a port file for a model: what config, tensors and transformers show is filled in, the rest is marked."""
    from firstlight.port.draft import draft
    from firstlight.verify.files import check_writable, write_report
    from firstlight.weights.source import locate

    out = Output(output)
    check_new(file, force=force)
    check_writable(file)
    out.model(model)
    made = draft(locate(model))
    write_report(file, made.text)
    if out.flags.json:
        out.json(made.to_dict() | {"file": str(file)})
    else:
        print_draft(out, made, file, model)
    return EXIT_OK


def check_new(file: Path, *, force: bool) -> None:
    """Raise FirstlightError if the file cannot be a new port."""
    if file.suffix != ".py":
        raise FirstlightError("a port is a Python file", where=f"-o {file}", why="its name must end in .py")
    if file.exists() and not force:
        raise FirstlightError(
            "the file is there already",
            where=f"-o {file}",
            why="a port that somebody worked on would be lost",
            fix="another name, or --force",
        )


def print_draft(out: Output, made: Draft, file: Path, model: str) -> None:
    """Print what was found and what to do next."""
    for pattern, layers in made.patterns():
        out.line(f"  layers {layers}  {pattern}")
    if made.why:
        out.line(f"the draft declares nothing yet: {made.why}", BAD)
    guesses, todos = made.text.count("# guess: "), made.text.count("# todo: ")
    out.line(
        f"{file}: {made.text.count(chr(10))} lines, {guesses} guesses, {todos} todos, "
        f"{len(made.unread)} config keys unread"
    )
    out.line(f"next  firstlight port status {file} {model}")


def status(model: Model, file: PortFile, output: OutputFlags, reference: Against = "transformers") -> int:
    """List what is left to do on a port; the list is empty exactly when the port is complete."""
    from firstlight.port.status import status as find

    out = Output(output)
    found = find(model, file, reference=reference)
    if out.flags.json:
        out.json(found.to_dict())
    else:
        print_status(out, found)
    return EXIT_OK if found.complete else EXIT_CHECK_FAILED


def print_status(out: Output, found: Status) -> None:
    """Print a block per item."""
    for number, item in enumerate(found.items, 1):
        out.line(f"{number:2d}  {item.kind}: {item.what}", WAIT)
        for name, text in (("where", item.where), ("fix", item.fix)):
            if text:
                out.line(f"    {name:5s} {text}")
    out.notices(found.notices)
    if not found.complete:
        out.line(f"{len(found.items)} left on {found.port}", BAD)
    elif found.proof is not None and found.proof.independent:
        proof = found.proof
        out.line(f"complete: {len(proof.checks)} checks equal to {proof.reference}, {proof.num_tokens} tokens", GOOD)
    else:
        out.line("complete, but unproven: nothing independent was compared", WAIT)


def report(
    model: Model,
    file: PortFile,
    output: OutputFlags,
    reference: Against = "transformers",
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    data: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the report as JSON.")] = None,
) -> int:
    """Report on a port, to attach to a pull request: what is reused and new, parity, speed against the floor, lines."""
    from firstlight.port.report import render
    from firstlight.port.report import report as find
    from firstlight.verify.files import check_writable, write_report

    out = Output(output)
    for path in filter(None, (page, data)):
        check_writable(path)
    found = find(model, file, reference=reference)
    if page is not None:
        write_report(page, render(found))
    if data is not None:
        write_report(data, json_text(found.to_dict()) + "\n")
    if out.flags.json:
        out.json(found.to_dict())
        return EXIT_OK if found.passed else EXIT_CHECK_FAILED
    rows = [(part.origin, part.part, part.where, f"{part.flops_share:.1%}") for part in found.parts]
    out.table(rows, header=("", "part", "where", "FLOPs"), right=(3,))
    speed, lines = found.speed, found.lines
    own = ", ".join(found.operators) or "none"
    out.line(f"{lines.code} lines of code ({lines.total} in all), operators of its own: {own}")
    out.line(f"{speed.ms:.2f} ms per token at batch 1, floor {speed.floor_ms:.3f} ms ({speed.dtype} on {speed.device})")
    print_status(out, found.status)
    return EXIT_OK if found.passed else EXIT_CHECK_FAILED
