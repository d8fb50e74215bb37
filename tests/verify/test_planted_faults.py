"""A fault planted in the port, checkpoint and reference intact, is reported at its layer and module.

More of them, with what explains them, are in test_tampered.py.

Default settings: the length that verify chooses must be long enough for each fault to show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verify.planted import run, write_port

from firstlight.engine.assemble import declare
from firstlight.ops.paged.cache import State
from firstlight.ops.registry import Impl
from firstlight.ops.rows import Rows
from firstlight.ops.short_conv import eager
from firstlight.verify.run import VerifyOptions, verify

Tiny = Callable[[str], Path]

# fixture, the planted change of one noun, where it must be reported
FAULTS = {
    "latent rope layout": ("deepseek_v3", "MLAttention", "rope=replace(n.rope, layout='half')", "layers.0.mixer"),
    "latent norm epsilon": ("kimi_linear", "MLAttention", "latent_norm_eps=1e-5", "layers.3.mixer.kv_a_norm"),
    "gate sign": ("glm5_next", "DeltaRule", "decay=replace(n.decay, lower_bound=5.0)", "layers.0.mixer"),
    "router bias": ("deepseek_v3", "MoE", "router=replace(n.router, bias='none')", "layers.1.ffn.router"),
    "index-key norm epsilon": (
        "deepseek_v32",
        "MLAttention",
        "indexer=replace(n.indexer, key_norm=Norm(kind='layer', eps=1e-5))",
        "layers.0.mixer.indexer.k_norm",
    ),
    "activation limit": ("glm5_next", "GLU", "act=replace(n.act, limit=10.0)", "layers.0.ffn"),
    "fewer selected": ("glm5_next", "MLAttention", "indexer=replace(n.indexer, topk=12)", "layers.3.mixer.indexer"),
    "one selected less": (
        "deepseek_v32",
        "MLAttention",
        "indexer=replace(n.indexer, topk=15)",
        "layers.0.mixer.indexer",
    ),
    "one selected more": (
        "glm_moe_dsa",
        "MLAttention",
        "indexer=replace(n.indexer, topk=17)",
        "layers.0.mixer.indexer",
    ),
    "one expert more": ("qwen3_moe", "MoE", "num_experts_per_tok=3", "layers.0.ffn.router"),
    "one expert less": ("deepseek_v3", "MoE", "num_experts_per_tok=1", "layers.1.ffn.router"),
    "sinkhorn iterations": ("glm5_next", "HyperConnections", "sinkhorn_iters=2", "layers.0.mixer_residual"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_reported_at_its_module(fault: str, tiny: Tiny, tmp_path: Path) -> None:
    name, noun, change, place = FAULTS[fault]
    report = run(tiny(name), write_port(tmp_path, name, noun, change))
    assert not report.passed
    assert report.first_divergence is not None
    assert report.first_divergence.place == place


@pytest.mark.parametrize("name", sorted({fault[0] for fault in FAULTS.values()}))
def test_port_without_a_fault_passes(name: str, tiny: Tiny, tmp_path: Path) -> None:
    port = write_port(tmp_path, name, "Nothing", "")
    assert run(tiny(name), port).passed


def test_wrong_order_of_convolution_taps_is_reported_at_the_recurrence(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = declare(str(tiny("kimi_linear")))
    declared.table.register("short_conv", "", Impl("flipped", f"{__name__}:flipped_taps", rank=99))
    monkeypatch.setattr(Impl, "load", lambda self: flipped_taps if self.name == "flipped" else original(self))
    report = verify(declared, declared.plan(), VerifyOptions())
    assert report.first_divergence is not None
    assert report.first_divergence.place == "layers.0.mixer"


original = Impl.load


def flipped_taps(x: Tensor, weight: Tensor, state: State, rows: Rows, *, act: str) -> Tensor:
    """Run the convolution with its taps in reverse."""
    return eager.short_conv(x, weight.flip(-1), state, rows, act=act)


def test_swapped_projections_in_the_name_map_are_reported_at_the_feed_forward(tiny: Tiny, tmp_path: Path) -> None:
    port = tmp_path / "swapped.py"
    port.write_text(
        "from firstlight.models.llama import NAMES as BASE, arch\n"
        "FFN = '{body}layers.{i}.mlp'\n"
        "OURS = 'layers.{i}.ffn'\n"
        "NAMES = BASE.extend({OURS + '.gate_proj': FFN + '.up_proj', OURS + '.up_proj': FFN + '.gate_proj'})\n"
    )
    report = run(tiny("llama"), port)
    assert report.first_divergence is not None
    assert report.first_divergence.place == "layers.0.ffn"


def test_reference_that_contradicts_itself_is_named(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def noisy(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        out = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        if kwargs.get("use_cache"):
            out.logits = out.logits + torch.ones_like(out.logits)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", noisy)
    report = run(tiny("llama"))
    assert not report.passed
    assert any("contradicts itself" in notice for notice in report.notices)


def test_window_longer_than_the_usual_length_is_tested_beyond_its_edge(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "windowed"
    shutil.copytree(tiny("qwen3_moe"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": 200}))
    assert run(folder).passed
    report = run(folder, write_port(tmp_path, "qwen3_moe", "GQAttention", "sliding_window=201"))
    assert report.first_divergence is not None
    assert report.first_divergence.place == "layers.0.mixer"


def test_swapped_norms_in_the_name_map_are_told_by_their_counterparts(tiny: Tiny, tmp_path: Path) -> None:
    port = tmp_path / "swapped.py"
    port.write_text(
        "from firstlight.models.llama import NAMES as BASE, arch\n"
        "A, B = '{body}layers.{i}.input_layernorm', '{body}layers.{i}.post_attention_layernorm'\n"
        "NAMES = BASE.extend({'layers.{i}.mixer_norm': B, 'layers.{i}.ffn_norm': A})\n"
    )
    first = run(tiny("llama"), port).first_divergence
    assert first is not None
    assert first.place == "layers.0"
    assert "mixer_norm = post_attention_layernorm" in first.note


def test_swapped_embedding_and_head_are_reported_not_crashed_on(tiny: Tiny, tmp_path: Path) -> None:
    port = tmp_path / "swapped.py"
    port.write_text(
        "from firstlight.models.llama import NAMES as BASE, arch\n"
        "NAMES = BASE.extend({'embed': 'lm_head', 'head': '{body}embed_tokens'})\n"
    )
    assert not run(tiny("llama"), port).passed


def test_tensor_that_is_not_finite_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    culprit = "model.layers.1.mlp.up_proj.weight"
    tensors[culprit][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = run(folder)
    assert not report.passed
    assert any(culprit in notice for notice in report.notices)


def test_a_norm_over_heads_is_told_by_its_token(tiny: Tiny, tmp_path: Path) -> None:
    port = write_port(tmp_path, "qwen3_next", "DeltaRule", "norm_eps=1e-4")
    report = run(tiny("qwen3_next"), port)
    first = report.first_divergence
    assert first is not None
    assert first.place == "layers.0.mixer.o_norm"
    assert first.hint.startswith("equal with mixer.norm_eps = 1e-06")
    assert all((check.position or 0) < report.num_tokens for check in report.checks)
