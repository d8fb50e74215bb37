"""The command line tool: verbs, and nothing else. `firstlight --help` imports no room."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from firstlight.cli import (
    cmd_bench,
    cmd_day0,
    cmd_env,
    cmd_generate,
    cmd_inspect,
    cmd_ops,
    cmd_plan,
    cmd_port,
    cmd_verify,
)
from firstlight.cli.verb import epilog, verb
from firstlight.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, FirstlightError

# what typer raises for a wrong command line; it exports only the most special of them
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: its function, its line in the overview, two examples, the page that tells more."""

    run: Callable[..., int]
    overview: str
    examples: tuple[str, str]
    docs: str = "README.md"


VERBS = {
    "day0": Verb(
        cmd_day0.day0,
        "the main job: inspect, plan, verify, generate, on one page",
        ("firstlight day0", "firstlight day0 ./NewModel-9B --output report.html"),
    ),
    "inspect": Verb(
        cmd_inspect.inspect,
        "what a model is made of; operator checklist (config is enough)",
        ("firstlight inspect kimi-linear-48b-a3b", "firstlight inspect ./config.json --json"),
        "docs/port.md",
    ),
    "plan": Verb(
        cmd_plan.plan,
        "which operator runs each layer, and why; memory, parallel layout",
        ("firstlight plan demo --explain", "firstlight plan demo --json > plan.json"),
        "docs/structure.md",
    ),
    "verify": Verb(
        cmd_verify.verify,
        "layer-by-layer comparison with a reference",
        ("firstlight verify demo --reference ref", "firstlight verify ./NewModel-9B --layers 3 --html verify.html"),
        "docs/verify.md",
    ),
    "port new": Verb(
        cmd_port.new,
        "write a port file for a model nobody has ported",
        ("firstlight port new ./NewModel-9B -o newmodel.py", "firstlight port new ./NewModel-9B -o x.py --json"),
        "docs/port.md",
    ),
    "port status": Verb(
        cmd_port.status,
        "what is left to do on a port",
        ("firstlight port status newmodel.py ./NewModel-9B", "firstlight port status x.py ./NewModel-9B --json"),
        "docs/port.md",
    ),
    "port report": Verb(
        cmd_port.report,
        "what a port reuses, its parity, its speed, on one page",
        (
            "firstlight port report newmodel.py ./NewModel-9B --html port.html",
            "firstlight port report newmodel.py ./NewModel-9B --output port.json",
        ),
        "docs/port.md",
    ),
    "generate": Verb(
        cmd_generate.generate,
        "continue a prompt",
        (
            'firstlight generate demo -p "At first light"',
            'firstlight generate ./NewModel-9B --chat -p "Who are you?" --temperature 0',
        ),
        "docs/engine.md",
    ),
    "bench": Verb(
        cmd_bench.bench,
        "how fast, against transformers generate",
        ("firstlight bench latency demo --dtype float32", "firstlight bench throughput ./NewModel-9B --save-result"),
        "docs/benchmarks.md",
    ),
    "ops": Verb(
        cmd_ops.ops,
        "operators and their bodies, usable here or why not",
        ("firstlight ops", "firstlight ops mla"),
        "docs/operators.md",
    ),
    "env": Verb(cmd_env.env, "versions, devices, memory", ("firstlight env", "firstlight env --json")),
}


def show_version(asked: bool) -> None:
    """Print the version and leave, if asked."""
    if asked:
        import firstlight

        print(f"firstlight {firstlight.__version__}")
        raise typer.Exit(EXIT_OK)


def start(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Runs a new open-weights LLM on the day it is released, and proves the port right."""


def build_app() -> typer.Typer:
    """Return the application with every verb."""
    made = typer.Typer(
        name="firstlight",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog=epilog("firstlight day0", "firstlight inspect kimi-linear-48b-a3b", docs="README.md"),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(start)
    groups = {"": made}
    for name, one in VERBS.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            groups[group] = group_of_verbs(group)
            made.add_typer(groups[group], name=group)
        told = epilog(*one.examples, docs=one.docs)
        groups[group].command(word, short_help=one.overview, epilog=told)(verb(one.run))
    made.command("collect-env", hidden=True)(verb(cmd_env.env))
    return made


def group_of_verbs(name: str) -> typer.Typer:
    """Return the application of verbs of two words."""
    members = ", ".join(verb.rpartition(" ")[2] for verb in VERBS if verb.startswith(f"{name} "))
    return typer.Typer(help=f"{name}: {members}", no_args_is_help=True, rich_markup_mode=None)


app = build_app()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. argv: the words after `firstlight`, None: those of the process."""
    words = sys.argv[1:] if argv is None else list(argv)
    # a stream that the caller has closed is None
    sys.stderr = sys.stderr or io.StringIO()
    if sys.stdout is None:
        why, fix = "it is closed", "leave it open, or send it to /dev/null"
        print(FirstlightError("cannot write", where="standard output", why=why, fix=fix), file=sys.stderr)
        return EXIT_USAGE
    for stream in (sys.stdout, sys.stderr):
        # a model may write what the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=words, prog_name="firstlight", standalone_mode=False)
    except UsageError as error:
        return usage_error(error, words)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else EXIT_OK


def usage_error(error: Exception, words: Sequence[str]) -> int:
    """Print a wrong command line in four lines and return the exit code."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not words:
        # typer has printed the help, or hands it over as the message
        print(message, file=sys.stderr, end="\n" if message else "")
        return EXIT_OK
    named = next((name for name in VERBS if words[: name.count(" ") + 1] == name.split()), "")
    command = f"firstlight {named}".rstrip()
    told = FirstlightError(
        message.rstrip(".") or "wrong usage",
        where=" ".join(["firstlight", *words]),
        why="the command line cannot be read",
        fix=f"{command} --help",
    )
    print(told, file=sys.stderr)
    return told.exit_code
