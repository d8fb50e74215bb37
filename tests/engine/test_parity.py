"""Every architecture against transformers: logits, splits, greedy tokens, selected index sets, both spellings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.released import released

from firstlight.engine.assemble import build_runner, declare
from firstlight.engine.runner import Row, Runner
from firstlight.layers.indexer import IndexLayer
from firstlight.memory.sequence import SequenceCache
from firstlight.quant.policy import PrecisionPolicy
from firstlight.verify.choices import positions_of

SPARSE = ("deepseek_v32", "glm_moe_dsa", "glm5_next")
ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "kimi_linear", "nemotron_h", *SPARSE)
# absolute, on logits of standard deviation 0.4: what two orders of fp32 summation differ by over 8 layers is 4e-6
LOGIT_TOLERANCE = 2e-5
SPLITS = {"one shot": [40], "23+17": [23, 17], "token by token": [1] * 40}

Tiny = Callable[[str], Path]


def runner_of(folder: Path, *, body: str | None = None, port_file: Path | None = None) -> Runner:
    """Return a fp32 runner of a folder, every operator bound to `body` where given."""
    declared = declare(str(folder), port_file=port_file)
    plan = declared.plan(PrecisionPolicy(backbone="float32"))
    if body:
        plan = plan.with_impl(body, "asked by the test")
    return build_runner(declared, plan, num_tokens=128, num_slots=2)[0]


def prompt(length: int = 40) -> list[int]:
    """Return the fixed random prompt."""
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def run_split(runner: Runner, ids: list[int], lengths: list[int]) -> torch.Tensor:
    """Return the logits of all tokens, fed in pieces of these lengths to a fresh sequence."""
    sequence = SequenceCache(runner.pool.blocks)
    pieces, start = [], 0
    try:
        for n in lengths:
            pieces.append(runner.run(sequence, ids[start : start + n], all_logits=True))
            start += n
    finally:
        sequence.release()
    return torch.cat(pieces)


def uncached(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the reference's logits of one uncached pass, unpadded."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("body", [None, "ref"], ids=["planned", "ref"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name: str, body: str | None, split: str, tiny: Tiny, reference: Any) -> None:
    runner = runner_of(tiny(name), body=body)
    found = run_split(runner, prompt(), SPLITS[split])
    assert (found - uncached(reference(name), prompt())).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(name: str, tiny: Tiny, reference: Any) -> None:
    runner, ids = runner_of(tiny(name)), prompt()
    sequence = SequenceCache(runner.pool.blocks)
    tokens = [int(runner.run(sequence, ids)[0].argmax())]
    while len(tokens) < 16:
        tokens.append(int(runner.run(sequence, tokens[-1:])[0].argmax()))
    expected = list(ids)
    for _ in range(16):
        expected.append(int(uncached(reference(name), expected)[-1].argmax()))
    assert tokens == expected[40:]


@pytest.mark.parametrize("name", SPARSE)
def test_selected_sets_equal_transformers(name: str, tiny: Tiny, reference: Any) -> None:
    runner, model, ids = runner_of(tiny(name)), reference(name), prompt()
    theirs: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(lambda owner, args, out: theirs.append(out[0]))
        for name_, module in model.named_modules()
        if name_.endswith(".indexer")
    ]
    handles += [
        module.register_forward_hook(lambda owner, args, out: ours.append(out))
        for module in runner.model.modules()
        if isinstance(module, IndexLayer)
    ]
    uncached(model, ids)
    sequence = SequenceCache(runner.pool.blocks)
    runner.run(sequence, ids)
    owner = next(iter(runner.pool.pages["latent"].planes))
    latent = runner.pool.views([sequence.hold(40)])[owner].pages["latent"]
    for handle in handles:
        handle.remove()
    assert len(ours) == len(theirs) > 0
    for slots, expected in zip(ours, theirs, strict=True):
        for t, (mine, their) in enumerate(zip(positions_of(slots, latent).tolist(), expected.tolist(), strict=True)):
            assert {p for p in mine if p >= 0} == {p for p in their if 0 <= p <= t}, f"token {t}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_released_spelling_gives_the_same_logits(name: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(tiny(name), folder)
    config = json.loads((folder / "config.json").read_text())
    rewritten = released(config)
    assert rewritten != config
    (folder / "config.json").write_text(json.dumps(rewritten))
    whole = [40]
    assert torch.equal(run_split(runner_of(folder), prompt(), whole), run_split(runner_of(tiny(name)), prompt(), whole))


@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h", "qwen3_next", "deepseek_v32", "glm5_next"])
def test_two_sequences_in_one_step_equal_each_alone(name: str, tiny: Tiny) -> None:
    runner, first, second = runner_of(tiny(name)), prompt(37), prompt(40)[::-1]
    alone = [run_split(runner, ids, [len(ids)]) for ids in (first, second)]
    one, two = SequenceCache(runner.pool.blocks), SequenceCache(runner.pool.blocks)
    for sequence in (one, two):
        sequence.reserve(40)
    with torch.inference_mode():
        runner.forward([Row(one.hold(20), 0, first[:20]), Row(two.hold(1), 0, second[:1])])
        hidden, step = runner.forward([Row(one.hold(37), 20, first[20:]), Row(two.hold(40), 1, second[1:])])
        rest = runner.model.logits(hidden, step.model_ops)
    assert (rest[:17] - alone[0][20:]).abs().max() <= LOGIT_TOLERANCE
    assert (rest[17:] - alone[1][1:]).abs().max() <= LOGIT_TOLERANCE


def test_short_context_of_a_sparse_model_equals_dense(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(tiny("deepseek_v32"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "index_topk": 100_000}))
    found = run_split(runner_of(folder), prompt(), [40])
    dense = json.loads((tiny("deepseek_v3") / "config.json").read_text())
    # the same weights read as a model without an index
    without = {key: value for key, value in config.items() if not key.startswith("index_") and key != "layer_types"}
    (folder / "config.json").write_text(json.dumps({**without, "model_type": dense["model_type"]}))
    port = tmp_path / "no_index.py"
    port.write_text(
        "from firstlight.models.deepseek_v3 import NAMES as BASE, arch\n"
        "NAMES = BASE.extend({}, ignore={r'indexer': 'dense on purpose'})\n"
    )
    assert (found - run_split(runner_of(folder, port_file=port), prompt(), [40])).abs().max() <= LOGIT_TOLERANCE
