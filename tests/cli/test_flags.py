"""The flags of every verb, frozen: a new one needs a line here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from firstlight.cli.main import VERBS, app

MODEL = ["MODEL", "--port", "--allow-unknown-keys"]
OUTPUT = ["--json", "--quiet", "-q", "--debug"]
PLAN = [
    "--op",
    "--plan",
    "--dtype",
    "--kv-cache-dtype",
    "--index-dtype",
    "--state-dtype",
    "--graph-mode",
    "--enforce-eager",
    "--parallel",
    "--tensor-parallel-size",
    "-tp",
    "--tp-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "-dp",
    "--prefill-context-parallel-size",
    "--enable-expert-parallel",
]
RUN = ["--seed", "--max-model-len"]
ENGINE = [
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--gpu-memory-utilization",
]
FLAGS = {
    "day0": [*MODEL, *PLAN, *RUN, *OUTPUT, "--reference", "--tokens", "--prompt", "-p", "--max-tokens", "--output"],
    "inspect": [*MODEL, *OUTPUT],
    "plan": [*MODEL, *PLAN, *OUTPUT, "--explain", "--max-model-len"],
    "verify": [
        *MODEL,
        *PLAN,
        *RUN,
        *OUTPUT,
        "--reference",
        "--layers",
        "--until",
        "--tokens",
        "--tol",
        "--html",
        "--output",
    ],
    "port new": ["MODEL", *OUTPUT, "--output", "-o", "--force"],
    "port status": ["FILE", "MODEL", *OUTPUT, "--reference"],
    "port report": ["FILE", "MODEL", *OUTPUT, "--reference", "--html", "--output"],
    "generate": [
        *MODEL,
        *PLAN,
        *RUN,
        *ENGINE,
        *OUTPUT,
        "--prompt",
        "-p",
        "--prompt-ids",
        "--chat",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--stop",
        "--ignore-eos",
        "--n",
        "--logprobs",
    ],
    "bench": [
        "WHAT",
        *MODEL,
        *PLAN,
        *RUN,
        *ENGINE,
        *OUTPUT,
        "--input-len",
        "--output-len",
        "--batch-size",
        "--num-iters",
        "--num-prompts",
        "--ignore-eos",
        "--no-ignore-eos",
        "--baseline",
        "--save-result",
        "--result-dir",
    ],
    "ops": ["NAME", *OUTPUT],
    "env": OUTPUT,
    "collect-env": OUTPUT,
}


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command by the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} ")
        else:
            yield f"{prefix}{name}", command


def test_verbs_have_exactly_the_flags_listed_here() -> None:
    found = {}
    for name, command in commands(typer.main.get_command(app)):
        words = []
        for parameter in command.params:
            own = parameter.opts if parameter.opts[0].startswith("-") else [parameter.name.upper()]
            words += [*own, *parameter.secondary_opts]
        found[name] = sorted(word for word in words if word not in ("--help", "-h"))
    assert found == {name: sorted(flags) for name, flags in FLAGS.items()}


def test_every_visible_verb_is_in_the_overview() -> None:
    assert set(VERBS) == set(FLAGS) - {"collect-env"}
