"""A model whose built-in port is hidden, with or without what transformers says of its class."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.models import registry
from firstlight.port import observe
from firstlight.port.draft import Draft, draft
from firstlight.port.reference import Reference
from firstlight.weights.source import locate

Tiny = Callable[[str], Path]
PATCHES = Path(__file__).parent / "patches"
MAX_PATCH_LINES = 40


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the package know no port of that name."""
    monkeypatch.setattr(registry, "NOT_PORTS", (*registry.NOT_PORTS, name))


class NoReference:
    """Stands for a transformers that does not know the class."""

    @staticmethod
    def of(folder: Path, prefix: str) -> Reference:
        """Return no facts."""
        return Reference(why="hidden by the test")


def drafted(monkeypatch: pytest.MonkeyPatch, folder: Path, *, name: str, evidence: str, file: Path) -> Draft:
    """Return the draft of a hidden model, written to a file. evidence: "class", or "names" without transformers."""
    hide(monkeypatch, name)
    if evidence == "names":
        monkeypatch.setattr(observe, "Reference", NoReference)
    made = draft(locate(str(folder)))
    file.write_text(made.text, encoding="utf-8")
    return made


def completed(file: Path, patch: Path) -> None:
    """Apply a stored patch to a port file; none is needed where there is none."""
    if not patch.exists():
        return
    text = patch.read_text(encoding="utf-8")
    changed = [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= MAX_PATCH_LINES, f"{patch.name} changes {len(changed)} lines"
    subprocess.run(["git", "apply", "--unsafe-paths", "-p1", str(patch)], cwd=file.parent, check=True)
