"""Verification of sound ports: passes, streams, covers what it claims to cover."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firstlight.engine.assemble import declare
from firstlight.errors import FirstlightError
from firstlight.verify.report import VerifyReport
from firstlight.verify.run import VerifyOptions, verify

Tiny = Callable[[str], Path]
ARCHITECTURES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_linear",
    "glm5_next",
)


def run(folder: Path | str, **options: object) -> VerifyReport:
    """Return the report of a folder."""
    declared = declare(str(folder))
    return verify(declared, declared.plan(), VerifyOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", ["transformers", "ref"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sound_port_passes(name: str, reference: str, tiny: Tiny) -> None:
    report = run(tiny(name), reference=reference)
    assert report.passed, report.first_divergence
    assert report.first_divergence is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_mixer_and_feed_forward_is_compared_with_transformers(name: str, tiny: Tiny) -> None:
    report = run(tiny(name))
    places = {check.place for check in report.checks}
    declared = declare(str(tiny(name)))
    for index, layer in enumerate(declared.arch.layers):
        wanted = {"", ".mixer", ".ffn", ".mixer_norm", ".ffn_norm", ".mixer.split"}
        if type(layer.mixer).__name__ == "DeltaRule":
            wanted |= {".mixer.recurrent", ".mixer.conv", ".mixer.o_norm"}
        if getattr(getattr(layer.mixer, "indexer", None), "mode", "") == "full":
            wanted |= {".mixer.indexer", ".mixer.indexer.k_norm"}
        if type(layer.ffn).__name__ == "MoE":
            wanted |= {".ffn.router", ".ffn.experts"}
        assert {f"layers.{index}{place}" for place in wanted} <= places
    assert {"embed", "norm", "head", "logits"} <= places
    assert all(check.recall == 1.0 for check in report.checks if check.kind == "selection")


def test_default_length_exceeds_topk_chunk_and_page(tiny: Tiny) -> None:
    report = run(tiny("glm5_next"))
    assert report.num_tokens > 128
    assert report.num_tokens % 64


def test_layers_can_be_chosen_and_logits_are_then_left_out(tiny: Tiny) -> None:
    report = run(tiny("llama"), layers=range(2, 4))
    assert {check.layer for check in report.checks if check.layer is not None} == {2, 3}
    assert not any(check.kind == "logits" for check in report.checks)


def test_layer_that_shares_a_selection_brings_the_owner_along(tiny: Tiny) -> None:
    report = run(tiny("glm_moe_dsa"), layers=range(3, 4))
    assert report.passed
    assert report.layers == (1, 2, 3)


@pytest.mark.parametrize("seed", range(3, 6))
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_ties_at_the_cut_are_told_and_blame_nobody(name: str, seed: int, tiny: Tiny) -> None:
    report = run(tiny(name), seed=seed, num_tokens=300)
    assert report.passed, report.first_divergence
    assert any("chose among ties" in check.note for check in report.checks)


@pytest.mark.parametrize("keeps_head", [False, True])
def test_tied_head_is_that_of_the_reference_too(keeps_head: bool, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if not keeps_head:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = run(folder)
    assert report.passed, report.first_divergence
    assert not report.notices


def test_own_reference_proves_the_bodies_and_not_the_port(tiny: Tiny) -> None:
    ours, theirs = run(tiny("llama"), reference="ref"), run(tiny("llama"))
    assert ours.passed
    assert theirs.passed
    assert "unproven" in ours.verdict
    assert theirs.verdict == "equal to its reference"


@pytest.mark.parametrize(
    "options", [{"layers": range(4, 9)}, {"num_tokens": 0}, {"num_tokens": 5000}, {"reference": "x"}]
)
def test_option_out_of_range_is_refused(options: dict[str, object], tiny: Tiny) -> None:
    with pytest.raises(FirstlightError):
        run(tiny("llama"), **options)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_short_sequences_are_compared_too(num_tokens: int, tiny: Tiny) -> None:
    assert run(tiny("glm5_next"), num_tokens=num_tokens).passed


def test_report_is_json(tiny: Tiny) -> None:
    report = run(tiny("llama"), layers=range(1))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["passed"] is True
    assert data["versions"]["torch"]
    assert len(data["checks"]) == len(report.checks)


MEMORY = """
import re, sys
from pathlib import Path
import torch, transformers
from firstlight.engine.assemble import declare
from firstlight.verify.run import VerifyOptions, verify

torch.set_num_threads(1)
small, large, reference = sys.argv[1:]
def peak(folder):
    declared = declare(folder)
    assert verify(declared, declared.plan(), VerifyOptions(reference=reference, num_tokens=8)).passed
    # unlike getrusage, not inherited from the parent
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
# the small one pays for imports and for a layer of the same size
print(peak(small), peak(large))
"""


@pytest.mark.parametrize("reference", ["transformers", "ref"])
def test_memory_is_that_of_one_layer_whatever_the_depth(reference: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 256}
    for name, depth in (("small", 2), ("large", 24)):
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=depth, **sizes)).save_pretrained(tmp_path / name)
    weights_mib = (tmp_path / "large" / "model.safetensors").stat().st_size / 2**20
    assert weights_mib > 300
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"), reference]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    small, large = map(float, out.split())
    # twice a layer of 14 MiB for what the allocator keeps; the whole checkpoint would be ten times that
    assert large - small < 30, f"{large - small:.0f} MiB more for {weights_mib:.0f} MiB of weights"
