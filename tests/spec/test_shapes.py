"""Weight shapes against the layers that hold them and against transformers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from reference_configs import TINY, of_transformers, tiny_config, tiny_weights
from spec.variants import HIDDEN, VARIANTS, variant

from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.spec.arch import ArchSpec, BlockAttnRes
from firstlight.spec.feedforward import MoE, SharedExpert
from firstlight.spec.mixers import GQAttention, OutputGate
from firstlight.spec.parts import OUTSIDE, parts
from firstlight.spec.shapes import Weight, part_weights

Declared = Callable[[dict[str, Any]], ArchSpec]


def named_weights(arch: ArchSpec) -> dict[str, Weight]:
    """Return the weights of a model by full name, experts written out."""
    found: dict[str, Weight] = {}
    for part in parts(arch):
        for place in part.places:
            for weight in part_weights(arch, part, place):
                prefix = "" if place == OUTSIDE else f"layers.{place}."
                for expert in range(weight.copies):
                    name = prefix + weight.name.replace("{e}", str(expert))
                    assert name not in found, name
                    found[name] = weight
    return found


@pytest.mark.parametrize("name", TINY)
def test_names_shapes_and_fp32_are_those_of_the_layers(name: str, declared: Declared) -> None:
    assert_held(declared(tiny_config(name)))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_names_shapes_and_fp32_of_every_field_are_those_of_the_layers(name: str, streams: bool) -> None:
    assert_held(variant(name, streams=streams))


def assert_held(arch: ArchSpec) -> None:
    """Check that the weights are the parameters of the decoder: same names, shapes and fp32."""
    held = {target.name: target for target in targets(Decoder.build(arch, torch.bfloat16))}
    ours = named_weights(arch)
    assert {key: weight.shape for key, weight in ours.items()} == {key: target.shape for key, target in held.items()}
    fp32 = {key for key, target in held.items() if getattr(target.module, target.attribute).dtype == torch.float32}
    assert {key for key, weight in ours.items() if weight.float32} == fp32


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_transformers(name: str, declared: Declared) -> None:
    ours = sum(prod(weight.shape) for weight in named_weights(declared(tiny_config(name))).values())
    assert ours == sum(map(prod, tiny_weights(name).values()))


DELTA_SIZES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
CHOSEN = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN_MOE = {**CHOSEN, "num_experts": 8, "shared_expert_intermediate_size": 28}
SPACE_SIZES = {
    "mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 8, "n_groups": 2,
    "layers_block_type": ["linear_attention"],
}  # fmt: skip
NEMOTRON_MOE = {**CHOSEN, "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 28}
# name of the variant, module of transformers, its configuration
MODULES = [
    ("delta rule, grouped", "qwen3_next.Qwen3NextGatedDeltaNet", DELTA_SIZES),
    ("delta rule, qkv in one", "qwen3_5_moe_text.Qwen3_5MoeGatedDeltaNet", DELTA_SIZES),
    ("delta rule, separate", "qwen3_5_moe_text.Qwen3_5MoeGatedDeltaNet", DELTA_SIZES),
    ("state space", "nemotron_h.NemotronHMamba2Mixer", SPACE_SIZES),
    ("state space, no bias", "nemotron_h.NemotronHMamba2Mixer", {**SPACE_SIZES, "use_conv_bias": False}),
    ("gate from q_proj", "qwen3_next.Qwen3NextAttention", HEADS),
    ("gate from q_proj, biased", "qwen3_next.Qwen3NextAttention", {**HEADS, "attention_bias": True}),
    ("gated shared expert", "qwen3_next.Qwen3NextSparseMoeBlock", QWEN_MOE),
    ("experts without a gate", "nemotron_h.NemotronHMoE", NEMOTRON_MOE),
    ("latent experts", "nemotron_h.NemotronHMoE", {**NEMOTRON_MOE, "moe_latent_size": 24}),
    ("unit without a gate", "nemotron_h.NemotronHMLP", {"intermediate_size": 50}),
    ("unit without a gate, biased", "nemotron_h.NemotronHMLP", {"intermediate_size": 50, "mlp_bias": True}),
    ("tanh gelu", "gemma2.Gemma2MLP", {"intermediate_size": 50}),
]


@pytest.mark.parametrize(("name", "path", "sizes"), MODULES)
def test_parameters_of_every_field_are_those_of_a_module_of_transformers(
    name: str, path: str, sizes: dict[str, Any]
) -> None:
    ours = {key: weight for key, weight in named_weights(variant(name)).items() if ".mixer." in key or ".ffn." in key}
    theirs = empty_module(path, sizes).state_dict()
    assert sum(prod(weight.shape) for weight in ours.values()) == sum(tensor.numel() for tensor in theirs.values())


def empty_module(path: str, sizes: dict[str, Any]) -> torch.nn.Module:
    """Return one module of a model, without memory. path: model type and class."""
    model_type, _, name = path.partition(".")
    family = model_type.removesuffix("_text")
    config = of_transformers("AutoConfig").for_model(model_type, hidden_size=HIDDEN, **sizes)
    make = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    place = (0,) if "layer_idx" in inspect.signature(make).parameters else ()
    with torch.device("meta"):
        module: torch.nn.Module = make(config, *place)
    return module


def test_a_gate_emitted_by_the_query_projection_doubles_it(declared: Declared) -> None:
    arch = declared(tiny_config("llama"))
    before = named_weights(arch)
    gate = OutputGate(act="sigmoid", source="q_proj")
    after = named_weights(with_mixer(arch, output_gate=gate, sinks=True))
    assert after["layers.0.mixer.q_proj.weight"].shape == (2 * before["layers.0.mixer.q_proj.weight"].shape[0], 64)
    assert after["layers.0.mixer.sinks"].shape == (4,)
    assert "layers.0.mixer.g_proj.weight" not in after


@pytest.mark.parametrize(
    ("rank", "shapes"),
    [(None, {"g_proj": (64, 64)}), (5, {"g_a_proj": (5, 64), "g_b_proj": (64, 5)})],
)
def test_a_gate_on_the_hidden_state_has_its_own_projections(
    rank: int | None, shapes: dict[str, tuple[int, int]], declared: Declared
) -> None:
    arch = with_mixer(declared(tiny_config("llama")), output_gate=OutputGate(act="sigmoid", rank=rank))
    found = named_weights(arch)
    gates = {key: weight.shape for key, weight in found.items() if key.startswith("layers.0.mixer.g_")}
    assert gates == {f"layers.0.mixer.{name}.weight": shape for name, shape in shapes.items()}


def test_a_gated_shared_expert_has_one_more_row(declared: Declared) -> None:
    arch = declared(tiny_config("qwen3_moe"))
    ffn = arch.layers[0].ffn
    assert isinstance(ffn, MoE)
    shared = replace(ffn, shared=SharedExpert(intermediate_size=48, gate="sigmoid"))
    found = named_weights(replace(arch, layers=(replace(arch.layers[0], ffn=shared),)))
    assert found["layers.0.ffn.shared_gate.weight"].shape == (1, 64)
    assert found["layers.0.ffn.shared.down_proj.weight"].shape == (64, 48)


def test_block_residual_attention_has_a_norm_and_a_query_per_sub_layer_and_at_the_end(declared: Declared) -> None:
    found = named_weights(replace(declared(tiny_config("llama")), residual=BlockAttnRes(block_size=2)))
    mixing = {key: weight.shape for key, weight in found.items() if "residual" in key}
    assert len(mixing) == 2 * (2 * 4 + 1)
    assert set(mixing.values()) == {(64,), (1, 64)}


def with_mixer(arch: ArchSpec, **changes: Any) -> ArchSpec:
    """Return the model with its attention changed in every layer."""
    mixer = arch.layers[0].mixer
    assert isinstance(mixer, GQAttention)
    changed = replace(mixer, **changes)
    return replace(arch, layers=tuple(replace(layer, mixer=changed) for layer in arch.layers))
