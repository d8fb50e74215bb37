"""Pages of the command line and of the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from firstlight import errors
from firstlight.cli.main import VERBS, app
from firstlight.verify.environment import KNOWN_VARIABLES, PREFIX
from pages.markdown import code, escaped, fence, table

ROOT = Path(__file__).parents[2]
WIDTH = 100

EXIT_CODES = {
    errors.EXIT_OK: "all well",
    errors.EXIT_CHECK_FAILED: "a check failed: something diverges, or a result differs",
    errors.EXIT_USAGE: "usage, configuration or files: the message says what, where, why, and what to try",
    errors.EXIT_MISSING_OPERATORS: "no port, or operators are missing",
    errors.EXIT_INTERRUPTED: "interrupted",
    errors.EXIT_BROKEN_PIPE: "the reader of a pipe has gone",
}

# read by libraries below, with an effect on what firstlight does
OF_LIBRARIES = {
    "OMP_NUM_THREADS": ("torch", "threads of one operator on a CPU; `firstlight env` shows the number in use"),
    "CUDA_VISIBLE_DEVICES": ("torch", "which GPUs are there; empty: none"),
    "HF_HOME": ("huggingface_hub", "where downloaded models are kept"),
    "HF_HUB_OFFLINE": ("huggingface_hub", "1: only models that are in that cache; a hub id never reaches the network"),
    "HF_TOKEN": ("huggingface_hub", "for models that need a login"),
    "NO_COLOR": ("rich", "any value: no colours"),
}


def command_line() -> str:
    """Return the page of verbs: the help of each, as the tool prints it."""
    texts = [
        "# Command line",
        "`firstlight VERB [MODEL] [flags]`. MODEL is `demo` (the default), a folder, a `config.json`, the name of a "
        "card or a hub id. JSON goes to stdout alone, all else to stderr.",
        table(
            ("verb", ""),
            [(f"[`{name}`](#{name.replace(' ', '-')})", escaped(verb.overview)) for name, verb in VERBS.items()],
        ),
        "Exit codes:",
        table(("code", ""), [(str(number), meaning) for number, meaning in EXIT_CODES.items()]),
    ]
    for name in VERBS:
        texts.append(f"## {name}")
        texts.append(fence(_help(name.split()), "text"))
    return "\n\n".join(texts)


def _help(words: list[str]) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="firstlight", terminal_width=WIDTH)
    assert shown.exit_code == 0, shown.output
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


def environment() -> str:
    """Return the page of environment variables: those the sources read, and those of libraries that matter here."""
    own = [(code(name), code(place)) for name, place in sorted(set(_read_by_us()))]
    listed = ", ".join(map(code, KNOWN_VARIABLES)) or "none yet"
    return "\n\n".join(
        [
            "# Environment variables",
            f"firstlight takes its settings from flags. Variables that begin with `{PREFIX}` and mean something: "
            f"{listed}; any other `{PREFIX}...` warns that it has no effect, at every command.",
            *(["Read by the project's own files:", table(("variable", "in"), own)] if own else []),
            "## Of the libraries below",
            table(
                ("variable", "read by", "effect"), [(code(name), *text) for name, text in sorted(OF_LIBRARIES.items())]
            ),
        ]
    )


def _read_by_us() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "firstlight").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            key = _environment_key(node)
            if key:
                yield key, path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tools" / "in_venv", ROOT / "tools" / "check_all"):
        for name in re.findall(r"\$\{([A-Z][A-Z_]+):-", path.read_text(encoding="utf-8")):
            yield name, path.relative_to(ROOT).as_posix()


def _environment_key(node: ast.AST) -> str | None:
    """Return the name in os.environ["X"], os.environ.get("X") or os.getenv("X")."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        inner: ast.AST = node.slice
    elif isinstance(node, ast.Call) and re.search(r"(environ\.\w+|getenv)$", ast.unparse(node.func)) and node.args:
        inner = node.args[0]
    else:
        return None
    return inner.value if isinstance(inner, ast.Constant) and isinstance(inner.value, str) else None
