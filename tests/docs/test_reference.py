"""The generated pages are what the code gives, whole, and speak of every field."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.main import VERBS
from firstlight.models.registry import built_in_models
from firstlight.ops.registry import operator_table
from firstlight.spec.read import Config

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
MAKE = [sys.executable, "tools/make_docs.py"]


def page(name: str) -> str:
    """Return a generated page."""
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def headings(name: str) -> set[str]:
    """Return the headings of a generated page, without their backquotes."""
    return set(re.findall(r"^#+ `?([\w. ]+)`?$", page(name), re.MULTILINE))


@pytest.fixture(scope="module")
def checked() -> subprocess.CompletedProcess[str]:
    """Return the outcome of the comparison with the code, made in the widest and in no terminal."""
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([*MAKE, "--check"], cwd=ROOT, capture_output=True, text=True, env=environment)


def test_pages_are_what_the_code_gives(checked: subprocess.CompletedProcess[str]) -> None:
    assert checked.returncode == 0, checked.stderr


def test_every_field_is_described(checked: subprocess.CompletedProcess[str]) -> None:
    assert "nothing says" not in checked.stderr, checked.stderr


def test_check_finds_a_stale_page(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, 'tools'); import make_docs\n"
        f"make_docs.OUT = pathlib.Path({str(tmp_path)!r})\n"
        "make_docs.PAGES = {'env': make_docs.PAGES['env']}\n"
        "sys.argv = ['make_docs']; assert make_docs.main() == 0\n"
        "sys.argv = ['make_docs', '--check']; assert make_docs.main() == 0\n"
        "path = make_docs.OUT / 'env.md'; path.write_text(path.read_text() + 'x'); sys.exit(make_docs.main())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1
    assert "env.md" in found.stderr


def test_every_operator_verb_model_and_way_to_read_a_key_is_there() -> None:
    assert set(operator_table().names()) <= headings("operators")
    assert set(VERBS) <= headings("cli")
    assert set(built_in_models()) <= headings("models")
    ways = {name for name in vars(Config) if not name.startswith("_") and callable(getattr(Config, name))}
    assert ways <= set(re.findall(r"^\| (?:`|<code>)(\w+)\(", page("config"), re.MULTILINE))


def test_every_noun_of_the_spec_is_in_the_vocabulary() -> None:
    wanted = {
        name
        for module in ("arch", "mixers", "feedforward", "norm", "noun", "weight", "caches")
        for name, value in vars(importlib.import_module(f"firstlight.spec.{module}")).items()
        if isinstance(value, type) and value.__module__ == f"firstlight.spec.{module}"
    }
    assert wanted <= headings("vocabulary")


def test_shapes_of_parameters_are_those_of_a_model() -> None:
    names = page("names")
    assert re.search(r"`mixer.q_proj.weight` \|  \| \\\[num_attention_heads \\\* head_dim, hidden_size\\\]", names)
    assert "`model.layers.3.self_attn.q_proj.weight`" in names
    assert re.search(r"`mixer.A_log` \|  \| \\\[num_v_heads\\\] fp32", names)
