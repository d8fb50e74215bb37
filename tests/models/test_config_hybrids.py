"""Facts of hybrids of recurrent layers and attention: which layer is what, the state space, gates, sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from reference_configs import Raw, changed, declare, lacking, of_transformers, refusal, written

from firstlight.models.nemotron_h import NAMES as NEMOTRON_NAMES
from firstlight.models.qwen3_next import NAMES as QWEN_NAMES
from firstlight.spec.cost import cost
from firstlight.spec.feedforward import GLU, Act, Latent, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2
from firstlight.spec.names import NameMap
from firstlight.spec.norm import Norm, Rope
from firstlight.spec.noun import NOTHING

# the config.json of Nemotron 3 Nano as released, bookkeeping left out
NANO: Raw = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


def test_a_released_nemotron_has_its_published_size() -> None:
    arch = declare(NANO)
    assert [sum(isinstance(layer.mixer, kind) for layer in arch.layers) for kind in (Mamba2, GQAttention)] == [23, 6]
    assert sum(isinstance(layer.ffn, MoE) for layer in arch.layers) == 23
    total = cost(arch).total
    assert round(total.parameters / 1e9, 1) == 31.6
    # 23 states of 64 x 64 x 128 in fp32 and windows of 3 x 6144; 6 layers of 2 x 2 x 128
    assert total.state_bytes_per_sequence == 23 * (4 * 64 * 64 * 128 + 2 * 3 * 6144)
    assert total.cache_bytes_per_token == 6 * 2 * 2 * 2 * 128


def test_a_letter_is_one_sub_layer_and_nothing_beside_it() -> None:
    layers = declare({**NANO, "hybrid_override_pattern": "M*-E", "num_hidden_layers": 4, "moe_latent_size": 512}).layers
    space, attention, dense, sparse = layers
    assert (space.ffn, attention.ffn, dense.mixer, sparse.mixer) == (NOTHING,) * 4
    assert space.mixer == Mamba2(
        num_heads=64, head_dim=64, state_size=128, num_groups=8, conv_kernel_size=4, norm_eps=1e-5, dt_min=0.001
    )
    assert attention.mixer == GQAttention(
        num_attention_heads=32, num_key_value_heads=2, head_dim=128, scaling=128**-0.5, rope=None
    )
    assert dense.ffn == GLU(intermediate_size=1856, act=Act(kind="relu2"))
    assert isinstance(sparse.ffn, MoE)
    assert sparse.ffn.latent == Latent(size=512)
    assert sparse.ffn.shared_unit() == GLU(intermediate_size=3712, act=Act(kind="relu2"))


def test_words_and_letters_say_the_same_and_may_stand_together() -> None:
    raw = changed("nemotron_h")
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    words = [old.get(word, word) for word in raw["layers_block_type"]]
    assert declare({**raw, "layers_block_type": words}) == declare(raw)
    assert declare({**raw, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}) == declare(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MM*-M"}, "layers_block_type and hybrid_override_pattern contradict each other"),
        ({"num_hidden_layers": 4}, "num_hidden_layers and layers of the pattern contradict each other"),
        ({"layers_block_type": ["mlp", "lstm"]}, "layers_block_type[1] = 'lstm' is not known"),
        ({"layers_block_type": "ME"}, "layers_block_type must list 0 layers"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M|"}, "hybrid_override_pattern has the letter '|'"),
        ({"n_groups": 4}, "mamba_num_heads=6 is not a multiple of n_groups=4"),
        ({"time_step_min": -0.1}, "time_step_min must not be negative"),
        ({"time_step_limit": [0.1, 0.2]}, "time_step_limit = [0.1, 0.2] is not supported"),
        ({"norm_eps": 1e-6}, "norm_eps = 1e-06 is not supported"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds the experts of topk_group groups=4"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not supported"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ({"use_bias": True}, "use_bias = True is not supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not supported"),
    ],
)
def test_a_nemotron_that_no_release_is_is_refused(changes: Raw, message: str) -> None:
    assert refusal(changed("nemotron_h", **changes)).what.startswith(message)


def test_an_old_nemotron_names_its_head_in_another_word_and_takes_the_usual_floor() -> None:
    raw = {**lacking("nemotron_h", "head_dim", "time_step_min"), "attention_head_dim": 24, "rms_norm_eps": 1e-5}
    layers = declare(raw).layers
    assert isinstance(layers[2].mixer, GQAttention)
    assert layers[2].mixer.head_dim == 24
    assert isinstance(layers[0].mixer, Mamba2)
    assert layers[0].mixer.dt_min == 0.001


@pytest.mark.parametrize(("interval", "full"), [(None, [3, 7]), (4, [3, 7]), (3, [2, 5]), (1, list(range(8))), (9, [])])
def test_attention_comes_at_an_interval_where_no_list_tells(interval: int | None, full: list[int]) -> None:
    raw = {**lacking("qwen3_next", "layer_types"), "num_hidden_layers": 8, "full_attention_interval": interval}
    mixers = [layer.mixer for layer in declare(raw).layers]
    assert [i for i, mixer in enumerate(mixers) if isinstance(mixer, GQAttention)] == full
    assert all(isinstance(mixer, DeltaRule | GQAttention) for mixer in mixers)


def test_a_list_of_layers_that_is_no_interval_is_read_and_one_that_contradicts_it_refused() -> None:
    kinds = ["full_attention", *["linear_attention"] * 3]
    raw = changed("qwen3_next", layer_types=kinds)
    assert [isinstance(layer.mixer, GQAttention) for layer in declare(raw).layers] == [True, False, False, False]
    assert refusal({**raw, "full_attention_interval": 4}).what == (
        "layer_types and full_attention_interval contradict each other"
    )


def test_a_qwen3_next_gates_its_attention_and_its_shared_expert_and_norms_by_one_plus_w() -> None:
    arch = declare(changed("qwen3_next", rms_norm_eps=3e-6))
    attention, norm = arch.layers[3].mixer, Norm(eps=3e-6, kind="rms1p")
    assert isinstance(attention, GQAttention)
    assert attention.output_gate is not None
    assert (attention.output_gate.act, attention.output_gate.source) == ("sigmoid", "q_proj")
    assert (attention.qk_norm, arch.norm, arch.layers[0].norm) == (norm, norm, norm)
    assert attention.rope == Rope(theta=10000.0, dim=4)
    delta = arch.layers[0].mixer
    assert isinstance(delta, DeltaRule)
    assert (delta.norm_eps, delta.qkv_layout, delta.output_gate.act) == (3e-6, "qkvz_grouped", "silu")
    sparse, dense = arch.layers[0].ffn, arch.layers[1].ffn
    assert isinstance(sparse, MoE)
    assert sparse.shared is not None
    assert (sparse.shared.gate, sparse.shared.intermediate_size) == ("sigmoid", 48)
    assert dense == GLU(intermediate_size=128)


def test_a_quarter_of_the_head_rotates_where_a_qwen3_next_does_not_say() -> None:
    mixer = declare({**lacking("qwen3_next", "rope_parameters"), "rope_theta": 1e7}).layers[3].mixer
    assert isinstance(mixer, GQAttention)
    assert mixer.rope == Rope(theta=1e7, dim=4)


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"hidden_act": "gelu"}])
def test_a_qwen3_next_that_no_release_is_is_refused(changes: dict[str, Any]) -> None:
    ((key, value),) = changes.items()
    assert refusal(changed("qwen3_next", **changes)).what == f"{key} = {value!r} is not supported"


@pytest.mark.parametrize(
    ("config_class", "billions", "active"), [("Qwen3NextConfig", 79.7, 3.9)], ids=["qwen3_next, class defaults"]
)
def test_the_size_of_class_defaults(config_class: str, billions: float, active: float) -> None:
    total = cost(declare(written(of_transformers(config_class)()))).total
    assert (round(total.parameters / 1e9, 1), round(total.active_parameters / 1e9, 1)) == (billions, active)


@pytest.mark.parametrize("names", [NEMOTRON_NAMES, QWEN_NAMES], ids=["nemotron_h", "qwen3_next"])
def test_layers_for_multi_token_prediction_are_skipped_with_the_reason(names: NameMap) -> None:
    assert names.ignored("mtp.layers.0.mixer.q_proj.weight") == "multi-token prediction layer, not run"
    assert names.ignored("backbone.layers.0.mixer.q_proj.weight") is None
