"""The README is true: its commands are those of CI, its verbs, links and table match the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from firstlight.cli.main import VERBS
from firstlight.models.registry import known_models
from firstlight.port.draft import draft
from firstlight.weights.source import locate

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def marked(name: str) -> list[str]:
    """Return the commands of a marked block."""
    found = re.search(rf"<!-- ci: {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
    assert found, f"no block marked {name}"
    return found[1].splitlines()


def test_ci_finds_the_commands_to_try_to_test_and_to_document() -> None:
    assert marked("docs") == ["tools/in_venv mkdocs build"]
    assert marked("first") == ["tools/in_venv firstlight day0"]
    assert marked("test") == ["tools/in_venv pytest"]


def test_first_command_of_the_readme_is_the_one_to_try() -> None:
    first = re.search(r"```sh\n(.*?)\n", README)
    assert first
    assert first[1] == marked("first")[0]


def test_every_verb_in_the_readme_exists() -> None:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    used = set(re.findall(r"firstlight +([a-z]\w+)", blocks))
    assert {"inspect", "plan", "verify", "generate", "day0", "port"} <= used
    assert used <= {verb.split()[0] for verb in VERBS}


def test_every_port_is_in_the_table_and_no_other() -> None:
    table = README.split("## Architectures")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == known_models()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_readme_says_how_the_command_is_found() -> None:
    start = README.split("## A model of yours")[0]
    assert ". .venv/bin/activate" in start


PORT_PAGE = (ROOT / "docs" / "port.md").read_text(encoding="utf-8")


def test_the_docs_of_a_port_name_the_reference_for_unknown_model_types() -> None:
    section = re.sub(r"\s+", " ", PORT_PAGE.split("## No class in transformers")[1].split("\n## ")[0])
    assert "--reference ref" in section
    assert "does not prove the port" in section


def test_the_draft_on_the_page_is_what_port_new_writes(tiny: Callable[[str], Path]) -> None:
    shown = re.search(r"```python\n(.*?)```", PORT_PAGE, re.DOTALL)
    assert shown
    made = draft(locate(str(tiny("qwen3_5_moe"))))
    version = re.compile(r"transformers [\d.]+")
    assert version.sub("transformers", shown[1]) in version.sub("transformers", made.text)
