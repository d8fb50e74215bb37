"""The README is true: its commands are those of CI, its verbs, links and table match the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from firstlight.cli.main import VERBS
from firstlight.errors import FirstlightError
from firstlight.models.registry import known_models

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


def test_the_docs_of_a_port_name_the_reference_for_unknown_model_types() -> None:
    steps = (ROOT / "docs" / "port.md").read_text(encoding="utf-8").split("## Steps")[1].split("##")[0]
    assert "--reference ref" in steps
    assert "does not prove the port" in steps


def test_port_in_the_docs_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "port.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code
    port = tmp_path / "newmodel.py"
    port.write_text(code[1])
    from firstlight.models.declare import read_arch
    from firstlight.models.registry import find_port

    config = {
        "model_type": "newmodel",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "hidden_act": "silu",
    }
    arch, _ = read_arch(config, find_port("newmodel", port_file=port))
    assert [type(layer.ffn).__name__ for layer in arch.layers] == ["GLU", "GLU", "MoE"]
    with pytest.raises(FirstlightError, match="hidden_act = 'gelu' is not supported"):
        read_arch({**config, "hidden_act": "gelu"}, find_port("newmodel", port_file=port))
    imported = [name for node in ast.parse(code[1]).body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert [name.name for name in imported if len(re.findall(rf"\b{name.name}\b", code[1])) < 2] == []
