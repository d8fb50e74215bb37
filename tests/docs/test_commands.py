"""Every command in the README and the docs runs, and what the pages say it prints is printed.

Blocks of shell get a copy of the demo model as ./NewModel, and the files that commands before them on the page wrote.
Before a block may stand

    <!-- fault: NAME, exit: N -->    a new ./NewModel with that fault (faults.py), and the exit code where it is not 0
    <!-- model: NAME, exit: N -->    the same, or a tiny checkpoint of that name, shared by such blocks of the page

A block of text right after it is what the tool says; `...` in it stands for anything.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from docs.faults import FAULTS

import firstlight
from firstlight.cli.main import main
from firstlight.models import registry
from firstlight.models.deadline import deadline

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
BLOCK = re.compile(
    r"(?:<!-- (?P<kind>fault|model): (?P<name>[\w-]+)(?:, exit: (?P<code>\d+))? -->\n)?"
    r"```sh\n(?P<lines>.*?)```\n(?:```text\n(?P<said>.*?)```)?",
    re.DOTALL,
)
# run whole by .ci/run in a new environment, or by another test here
ELSEWHERE = {
    "tools/in_venv firstlight day0": ".ci/run",
    "tools/in_venv pytest": ".ci/run",
    "tools/in_venv mkdocs build": "tests/docs/test_site.py",
}


@dataclass(frozen=True)
class Block:
    """Commands of a page with what is said about them. kind, name: of the comment before them."""

    kind: str | None
    name: str | None
    code: int
    commands: tuple[str, ...]
    said: str | None


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        text = found["lines"].replace("\\\n", " ")
        lines = [shlex.join(shlex.split(line, comments=True)) for line in text.splitlines()]
        yield Block(found["kind"], found["name"], int(found["code"] or 0), tuple(filter(None, lines)), found["said"])


def pattern(said: str) -> str:
    """Return the regular expression of a block of text: `...` is anything, also on lines of its own."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in said.rstrip("\n").splitlines()]
    return "\n".join(r"(?:.*\n)*?.*" if line == ".*" else line for line in lines)


@dataclass(frozen=True)
class Outcome:
    """What a command gave. text: stdout, then stderr."""

    code: int
    text: str


def run(command: str, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command in this process, in the current folder."""
    words = shlex.split(command)
    assert words[0] == "firstlight", f"who runs {command!r}?"
    target = words[words.index(">") + 1] if ">" in words else None
    capsys.readouterr()
    code = main(words[1 : words.index(">")] if target else words[1:])
    caught = capsys.readouterr()
    if target:
        Path(target).write_text(caught.out)
    return Outcome(code, caught.out + caught.err)


def new_folder(where: Path, name: str | None, tiny: Callable[[str], Path]) -> Path:
    """Return a folder with ./NewModel: the demo model, a llama with a fault, or a tiny checkpoint of that name."""
    if where.exists():
        return where
    where.mkdir()
    demo = Path(firstlight.__file__).parent / "data" / "demo"
    shutil.copytree(demo if name is None else tiny("llama" if name in FAULTS else name), where / "NewModel")
    if name in FAULTS:
        with contextlib.chdir(where):
            FAULTS[name]()
    return where


done: set[str] = set()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(
    page: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    for number, block in enumerate(blocks(PAGES[page])):
        place = tmp_path / (str(number) if block.kind == "fault" else f"model {block.name}")
        monkeypatch.chdir(new_folder(place, block.name, tiny))
        if block.name == "port-does-not-end":
            monkeypatch.setattr(registry, "deadline", lambda seconds: deadline(0.5))
        for command in block.commands:
            # the same command on the same model need not run for every page
            if command in ELSEWHERE or (block.name is None and command in done):
                continue
            outcome = run(command, capsys)
            assert outcome.code == block.code, f"{command}: {outcome.text}"
            if block.said:
                assert re.search(pattern(block.said), outcome.text), f"{command}: {outcome.text}"
            if block.name is None:
                done.add(command)
        monkeypatch.setattr(registry, "deadline", deadline)


def test_every_fault_is_on_a_page() -> None:
    told = {block.name for page in PAGES.values() for block in blocks(page)}
    assert set(FAULTS) <= told, set(FAULTS) - told


def test_what_runs_elsewhere_is_on_a_page() -> None:
    told = {command for page in PAGES.values() for block in blocks(page) for command in block.commands}
    assert set(ELSEWHERE) <= told


def test_every_block_of_shell_is_seen() -> None:
    for name, page in PAGES.items():
        assert page.read_text(encoding="utf-8").count("```sh\n") == len(list(blocks(page))), name


def test_verbs_and_flags_in_the_text_exist() -> None:
    known = PAGES["docs/reference/cli.md"].read_text(encoding="utf-8")
    verbs, flags = set(re.findall(r"^## ([\w ]+)$", known, re.MULTILINE)), set(re.findall(r"--[a-z][\w-]+", known))
    # of other programs
    flags |= {"--strict", "--check", "--help", "--version"}
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        for used in re.findall(r"`firstlight ([a-z]\w*(?: [a-z]\w*)?)", text):
            assert {used, used.split()[0]} & (verbs | {"port", "collect"}), f"{name}: firstlight {used}"
        assert set(re.findall(r"`(--[a-z][\w-]+)", text)) <= flags, name


def test_absent_transformers_is_told_as_the_page_says() -> None:
    from firstlight.verify import oracle_hf

    said = re.findall(
        r"```text\nerror: (--reference transformers .*)\n```", PAGES["docs/troubleshooting.md"].read_text()
    )
    assert len(said) == 1
    assert f'"{said[0]}"' in Path(oracle_hf.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/memory.md", "docs/precision.md"])
def test_python_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"```python\n(.*?)```", PAGES[page].read_text(encoding="utf-8"), re.DOTALL)
    assert found
    for code in found:
        exec(code, {})
        assert capsys.readouterr().out.strip()
