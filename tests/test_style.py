"""The house rules that a machine can check: sizes, docstrings, ASCII, imports, and the linters."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "firstlight"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# in the order of imports: a room may import those above it, never one below
ROOMS = [
    "errors",
    "spec",
    "ops",
    "recurrence",
    "quant",
    "layers",
    "models",
    "weights",
    "memory",
    "parallel",
    "plan",
    "text",
    "engine",
    "verify",
    "port",
    "serve",
    "bench",
    "cli",
]

MAX_LINES, MAX_MODEL_LINES, MAX_FUNCTION_LINES, MAX_REF_LINES = 400, 150, 60, 80
SKIPPED = ("__pycache__", "data")
MODEL_TOOLS = {"declare.py", "registry.py", "known.py", "__init__.py"}


def room(path: Path) -> str:
    """Return the room of a source file."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_obeys_sizes_and_docstrings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    text.encode("ascii")
    lines = text.count("\n")
    is_model = path.parent.name == "models" and path.name not in MODEL_TOOLS
    limit = MAX_MODEL_LINES if is_model else MAX_REF_LINES if path.name == "ref.py" else MAX_LINES
    assert lines <= limit, f"{lines} lines, at most {limit}"
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), "a module says in its docstring what it is for"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} is public and has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = room(path)
    if own not in ROOMS:
        return
    for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
        head, _, rest = module.partition(".")
        if head == "firstlight" and rest:
            other = rest.partition(".")[0]
            if other == "data" or other not in ROOMS:
                continue
            assert ROOMS.index(other) <= ROOMS.index(own), f"{own}/ imports {other}/, which lies below it"


@pytest.mark.parametrize("room_name", ["spec", "errors", "cli"])
def test_room_imports_no_torch_at_module_level(room_name: str) -> None:
    for path in (p for p in SOURCES if room(p) == room_name):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = [name for node in top if isinstance(node, (ast.Import, ast.ImportFrom)) for name in imported(node)]
        assert not any(name.split(".")[0] in ("torch", "transformers") for name in names), path


def test_every_room_of_the_package_is_known() -> None:
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name.isidentifier() and p.name not in SKIPPED}
    assert found <= set(ROOMS)


def test_no_model_name_outside_models() -> None:
    models = {p.stem for p in (PACKAGE / "models").glob("*.py")} - {Path(name).stem for name in MODEL_TOOLS}
    for path in SOURCES:
        if room(path) in ("layers", "ops", "engine", "memory", "recurrence", "parallel", "plan", "verify"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            assert not words & models, f"{path.name} names a model: {words & models}"


def test_importing_the_package_pulls_no_torch() -> None:
    code = "import sys, firstlight; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LINTERS = {
    "ruff": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "codespell": ["codespell_lib", "firstlight", "tests", "docs", "README.md"],
}


@pytest.mark.parametrize("name", LINTERS)
def test_linter_passes(name: str) -> None:
    found = subprocess.run([sys.executable, "-m", *LINTERS[name]], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
