"""Nine wrong facts, each located and explained: words planted in the port, structure in the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from verify.planted import run, write_port

from firstlight.errors import FirstlightError
from firstlight.verify.report import innermost

Tiny = Callable[[str], Path]
Tensors = dict[str, Tensor]

# fixture, noun, change of the port; where it is located, and the hint
PLANTED = {
    "norm epsilon": ("qwen3", "Layer", "norm=Norm(eps=1e-5)", "layers.0.mixer_norm",
                     "equal with norm.eps = 1e-06, rms_norm_eps of config.json (the port says 1e-05)"),
    "decay form": ("kimi_linear", "DeltaRule", "decay=replace(n.decay, form='bounded', lower_bound=-5.0)",
                   "layers.0.mixer", "equal with mixer.decay.form = 'softplus' (the port says 'bounded')"),
    "other decay form": ("glm5_next", "DeltaRule", "decay=replace(n.decay, form='softplus', lower_bound=None)",
                         "layers.0.mixer", "equal with mixer.decay.form = 'bounded' (the port says 'softplus')"),
    "missing query norm": ("qwen3", "GQAttention", "qk_norm=None",
                           "layers.0.self_attn.k_norm.weight", "a norm of query and key heads: qk_norm=Norm(...)"),
    "gate activation": ("kimi_linear", "DeltaRule", "output_gate=replace(n.output_gate, act='silu')",
                        "layers.0.mixer.o_norm",
                        "equal with mixer.output_gate.act = 'sigmoid' (the port says 'silu')"),
    "rotary layout": ("llama", "GQAttention", "rope=replace(n.rope, layout='interleave')", "layers.0.mixer",
                      "equal with mixer.rope.layout = 'half' (the port says 'interleave')"),
    "index rotary layout": ("deepseek_v32", "MLAttention",
                            "indexer=replace(n.indexer, rope=replace(n.indexer.rope, layout='interleave'))",
                            "layers.0.mixer.indexer",
                            "equal with mixer.indexer.rope.layout = 'half' (the port says 'interleave')"),
    "routing scale": ("deepseek_v3", "Router", "scale=1.0", "layers.1.ffn.router",
                      "equal with ffn.router.scale = 2.5, routed_scaling_factor of config.json (the port says 1.0)"),
    "shared expert left out": ("deepseek_v3", "MoE", "shared=None",
                               "layers.1.mlp.shared_experts.down_proj.weight",
                               "a shared expert that the declaration leaves out: MoE(shared=SharedExpert(...))"),
}  # fmt: skip


@pytest.mark.parametrize("fact", PLANTED)
def test_a_wrong_word_in_the_port_is_located_and_explained(fact: str, tiny: Tiny, tmp_path: Path) -> None:
    name, noun, change, place, hint = PLANTED[fact]
    first = run(tiny(name), write_port(tmp_path, name, noun, change)).first_divergence
    assert first is not None
    assert (first.place, first.hint) == (place, hint)


def extra_bias(tensors: Tensors) -> Tensors:
    """Return the tensors of llama with a bias on every query projection."""
    wide = {name: tensor for name, tensor in tensors.items() if name.endswith("q_proj.weight")}
    return {**tensors, **{name.replace("weight", "bias"): torch.ones(len(t)) for name, t in wide.items()}}


def renamed_block(tensors: Tensors) -> Tensors:
    """Return the tensors with the feed-forward under another name."""
    return {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in tensors.items()}


def dropped_shared_expert(tensors: Tensors) -> Tensors:
    """Return the tensors without the shared experts."""
    return {name: tensor for name, tensor in tensors.items() if "shared_experts" not in name}


# fixture, change of the checkpoint; how many faults, the first of them, what it says and the hint
TAMPERED = {
    "extra bias": ("llama", extra_bias, 1, "layers.0.self_attn.q_proj.bias",
                   "model.layers.{n}.self_attn.q_proj.bias [64] has no place in layers 0-3",
                   "a bias that the declaration leaves out: bias=True, or the like, in the noun that owns "
                   "model.layers.0.self_attn.q_proj"),
    "renamed block": ("llama", renamed_block, 6, "layers.0.ffn.gate_proj.weight",
                      "no tensor fills layers.{n}.ffn.gate_proj.weight in layers 0-3",
                      "looked for model.layers.0.mlp.gate_proj.weight; renamed, it seems: "
                      'NAMES.extend({"layers.{i}.ffn": "model.layers.{i}.feed_forward"})'),
    "dropped shared expert": ("deepseek_v3", dropped_shared_expert, 3, "layers.1.ffn.shared.gate_proj.weight",
                              "no tensor fills layers.{n}.ffn.shared.gate_proj.weight in layers 1-3",
                              "looked for model.layers.1.mlp.shared_experts.gate_proj.weight; "
                              "without a shared expert: MoE(shared=None)"),
}  # fmt: skip


def tampered(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Return a copy of a model folder with other tensors."""
    shutil.copytree(source, target)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("fact", TAMPERED)
def test_a_checkpoint_of_another_structure_is_located_and_explained(fact: str, tiny: Tiny, tmp_path: Path) -> None:
    name, change, count, place, note, hint = TAMPERED[fact]
    report = run(tampered(tiny(name), tmp_path / "tampered", change))
    assert not report.passed
    first = report.first_divergence
    assert first is not None
    assert (first.kind, first.place, first.note, first.hint) == ("weights", place, note, hint)
    assert sum(check.kind == "weights" for check in report.checks) == count


def test_what_has_its_tensors_is_compared_though_others_lack_theirs(tiny: Tiny, tmp_path: Path) -> None:
    """A port that maps no feed-forward yet: mixers and norms are proven, the reference runs on."""
    port = tmp_path / "newmodel.py"
    port.write_text(
        "from firstlight.models.llama import NAMES as BASE, arch\n"
        "NAMES = BASE.extend({'layers.{i}.ffn': 'nowhere.{i}'})\n"
    )
    report = run(tiny("llama"), port)
    good = {check.place for check in report.checks if check.passed}
    for layer in range(4):
        assert {f"layers.{layer}.mixer", f"layers.{layer}.mixer_norm", f"layers.{layer}.ffn_norm"} <= good
    assert {"embed", "norm", "head"} <= good
    assert {check.kind for check in report.checks if not check.passed} == {"weights"}
    # nothing whole can be told of layers and of the own pass
    assert not {"layer", "logits"} & {check.kind for check in report.checks}


def test_a_wrong_word_shows_beside_a_tensor_without_a_place(tiny: Tiny, tmp_path: Path) -> None:
    folder = tampered(tiny("llama"), tmp_path / "tampered", extra_bias)
    report = run(folder, write_port(tmp_path, "llama", "GQAttention", "rope=replace(n.rope, layout='interleave')"))
    first = innermost([check for check in report.checks if not check.passed])
    assert first is not None
    assert first.place == "layers.0.mixer"
    assert first.hint == "equal with mixer.rope.layout = 'half' (the port says 'interleave')"


def test_an_embedding_or_norm_without_a_name_leaves_the_rest_to_the_reference(tiny: Tiny, tmp_path: Path) -> None:
    port = tmp_path / "newmodel.py"
    port.write_text(
        "from firstlight.models.llama import NAMES as BASE, arch\n"
        "NAMES = BASE.extend({'embed': 'nowhere', 'norm': 'nowhere'})\n"
    )
    report = run(tiny("llama"), port)
    assert {check.place for check in report.checks if not check.passed and check.layer is None} == {
        "embed.weight", "norm.weight", "model.embed_tokens.weight", "model.norm.weight",
    }  # fmt: skip
    assert all(check.passed for check in report.checks if check.layer is not None)
    assert sum(check.kind == "layer" for check in report.checks) == 4


def test_our_own_reference_needs_every_tensor(tiny: Tiny, tmp_path: Path) -> None:
    folder = tampered(tiny("llama"), tmp_path / "tampered", extra_bias)
    with pytest.raises(FirstlightError, match="do not fit"):
        run(folder, reference="ref")
