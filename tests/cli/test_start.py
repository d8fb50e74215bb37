"""Starting up: fast, without torch, and helpful."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import Run

from firstlight.cli.main import VERBS

ROOT = Path(__file__).parents[2]


def modules_after(code: str) -> set[str]:
    """Return the modules that are loaded after running code in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import firstlight; firstlight.FirstlightError; firstlight.__version__",
        "from firstlight.cli.main import main; main(['--help'])",
        "from firstlight.cli.main import main; main(['verify', '--help'])",
        "from firstlight.cli.main import main; assert main(['inspect', 'qwen3-30b-a3b']) == 0",
    ],
    ids=["import", "help", "help of a verb", "inspect"],
)
def test_torch_is_not_imported(code: str) -> None:
    loaded = modules_after(code)
    assert "firstlight" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


def test_lazy_names_resolve_and_unknown_ones_do_not() -> None:
    import firstlight

    assert all(getattr(firstlight, name) is not None for name in firstlight.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        firstlight.no_such_name  # noqa: B018


def test_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "firstlight", "inspect", "no-such-model"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_two_examples_and_the_docs(run: Run, verb: str) -> None:
    result = run(*verb.split(), "--help")
    assert result.code == 0
    lines = [line.strip() for line in result.out.rstrip().splitlines()]
    assert lines[-1] == f"Docs: {VERBS[verb].docs}"
    assert (ROOT / VERBS[verb].docs).is_file()
    start = lines.index("Examples:")
    assert lines[start + 1 : -2] == list(VERBS[verb].examples)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_use_flags_that_exist(run: Run, verb: str) -> None:
    told = run(*verb.split(), "--help").out
    used = [word for example in VERBS[verb].examples for word in example.split() if word.startswith("-")]
    assert all(f"{word} " in told or f"{word}," in told for word in used)


def test_version_is_printed(run: Run) -> None:
    assert run("--version").out.startswith("firstlight ")


def test_no_verb_prints_the_help(run: Run) -> None:
    result = run()
    assert "day0" in result.out + result.err


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (("verify", "--no-such-flag"), "--no-such-flag"),
        (("verifyy",), "verify"),
        (("verify", "--tokens", "many"), "many"),
        (("generate", "demo", "stray"), "stray"),
        (("plan", "--plan"), "--plan"),
    ],
)
def test_wrong_usage_exits_2_in_four_lines(run: Run, words: tuple[str, ...], culprit: str) -> None:
    result = run(*words)
    assert (result.code, result.out) == (2, "")
    assert culprit in result.refusal()
