"""Runs the command line inside the test's own process, and makes models to break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.cli.main import main

LABELS = ("error: ", "  where ", "  why ", "  try ")


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def data(self) -> Any:
        """Return the one JSON document on stdout."""
        return json.loads(self.out)

    def refusal(self) -> str:
        """Return the error, after checking that it is labelled lines in order, none empty, and no stack trace."""
        assert "Traceback" not in self.err
        lines = self.err[self.err.index("error: ") :].rstrip("\n").splitlines()
        labelled = [line for line in lines if not line.startswith("        ")]
        starts = [next((label for label in LABELS if line.startswith(label)), line) for line in labelled]
        assert starts == [label for label in LABELS if label in starts], self.err
        assert starts[:2] == list(LABELS[:2]), self.err
        assert all(line.split(maxsplit=1)[1:] for line in labelled), self.err
        return "\n".join(lines)


Run = Callable[..., Result]
Broken = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep tiny matrices on one thread: waiting for others costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `firstlight` with words and returns what it left behind."""

    def command(*words: object) -> Result:
        capsys.readouterr()
        code = main([str(word) for word in words])
        caught = capsys.readouterr()
        return Result(code, caught.out, caught.err)

    return command


@pytest.fixture
def broken(tiny: Callable[[str], Path], tmp_path: Path) -> Broken:
    """Return a function that copies a tiny checkpoint, with changes to its config.json."""

    def copy(name: str = "llama", **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny(name), folder)
        if changes:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return copy
