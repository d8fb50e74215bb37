"""What the names in a config.json and a checkpoint betray about a model without a port."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from firstlight.models.known import known_ports
from firstlight.ops.registry import OperatorTable
from firstlight.spec.cards import card, card_names
from firstlight.spec.evidence import Evidence, KnownPort, jaccard, numbered, recognise, tensor_pattern

# a recurrence, an indexed attention, an aggregation over earlier layers and latent experts in one model
HYBRID: dict[str, Any] = {
    "model_type": "unheard_of",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "linear_attn_config": {"head_dim": 128, "num_heads": 32, "kda_layers": [1, 2, 3], "new_switch": True},
    "attn_res_block_size": 8,
    "num_experts": 8,
    "routed_expert_hidden_size": 32,
    "hidden_act": "situ",
    "layer_types": ["linear_attention", "full_attention", "quantum_attention"],
    "frobnicate": 3,
    "silent": None,
}


@pytest.fixture(scope="module")
def known() -> dict[str, KnownPort]:
    """Return what the shipped ports read and cover."""
    return known_ports()


def without(known: dict[str, KnownPort], *names: str) -> dict[str, KnownPort]:
    """Return the ports but some."""
    return {key: port for key, port in known.items() if key not in names}


def meanings(found: Evidence) -> dict[str, tuple[str, ...]]:
    """Return meaning -> sources."""
    return {finding.meaning: finding.sources for finding in found.findings}


@pytest.mark.parametrize("name", card_names())
def test_a_known_model_leaves_nothing_unread_or_unrecognised(name: str, known: dict[str, KnownPort]) -> None:
    raw = card(name)
    found = recognise(raw, known=known)
    assert (found.unread_keys, found.unrecognised, found.lacking_operators) == ((), (), ())
    assert found.nearest is not None
    assert found.nearest.model_type == raw["model_type"]


@pytest.mark.parametrize("name", card_names())
def test_the_tensors_of_a_known_model_are_covered_and_recognised(name: str, known: dict[str, KnownPort]) -> None:
    raw = card(name)
    port = known[raw["model_type"]]
    names = [f"model.{pattern.replace('{n}', '0')}" for pattern in port.tensor_patterns]
    found = recognise(raw, names, known=known)
    assert (found.uncovered_patterns, found.unrecognised) == ((), ())
    assert found.nearest is not None
    assert (found.nearest.model_type, found.nearest.tensor_score) == (raw["model_type"], 1.0)


def test_a_model_whose_port_is_removed_is_told_by_its_relatives(known: dict[str, KnownPort]) -> None:
    found = recognise(card("deepseek-v3.2"), known=without(known, "deepseek_v32"))
    assert found.nearest is not None
    assert found.nearest.model_type in ("deepseek_v3", "glm_moe_dsa")
    assert found.nearest.score == max(score for _, score in found.ranking)


def test_what_the_known_ports_lack_is_named(known: dict[str, KnownPort]) -> None:
    found = recognise(card("glm-5.3-flash"), known=without(known, "glm5_next"))
    assert found.lacking_operators == ("index_pool", "hyper_read", "hyper_write", "hyper_head")
    assert {"hc_mult", "index_kpool", "swiglu_limit"} <= set(found.unread_keys)
    assert found.unrecognised == ()


def test_operators_that_no_port_uses_but_that_exist_are_not_lacking(known: dict[str, KnownPort]) -> None:
    lacking = recognise(HYBRID, known=known).lacking_operators
    assert "attn_res" in lacking
    assert "attn_res" not in recognise(HYBRID, known=known, operators=["attn_res"]).lacking_operators


def test_each_part_of_an_unknown_hybrid_is_found_with_its_source(known: dict[str, KnownPort]) -> None:
    found = meanings(recognise(HYBRID, known=known))
    assert found["latent attention (MLA)"] == ("kv_lora_rank = 512", "qk_rope_head_dim = 64")
    assert "linear_attn_config.num_heads = 32" in found["gated delta rule, decay per channel (KDA)"]
    assert "layer_types = linear_attention" in found["gated delta rule, decay per channel (KDA)"]
    assert found["attention over the outputs of earlier blocks"] == ("attn_res_block_size = 8",)
    assert found["SiTU activation"] == ("hidden_act = situ",)
    assert "experts of a narrower latent width" in found
    assert "grouped-query attention" not in found
    assert found["latent row of 576 values per token"] == ("kv_lora_rank", "qk_rope_head_dim")
    assert "recurrent state of 32 x 128 x 128 values per sequence" in found


def test_what_no_clue_explains_is_listed_and_null_says_nothing(known: dict[str, KnownPort]) -> None:
    found = recognise(HYBRID, known=known)
    expected = ("linear_attn_config.new_switch = True", "layer_types = quantum_attention", "frobnicate = 3")
    assert found.unrecognised == expected
    assert found.unread_keys == ("attn_res_block_size", "frobnicate", "routed_expert_hidden_size")


def test_an_unrecognised_object_is_listed_once(known: dict[str, KnownPort]) -> None:
    found = recognise({"model_type": "x", "novelty": {"a": 1, "b": {"c": "d"}}}, known=known)
    assert found.unrecognised == ("novelty",)


@pytest.mark.parametrize(
    ("key", "value", "operator"),
    [
        ("mamba_num_heads", 8, "mamba2"),
        ("ssm_state_size", 16, "mamba2"),
        ("o_groups", 8, "grouped_output"),
        ("compress_rates", {"a": 4}, "compressed_attention"),
        ("attn_res_block_size", 8, "attn_res"),
        ("hidden_act", "relu2", "activation"),
        ("hidden_activation", "gelu", "gelu"),
        ("attn_logit_softcapping", 50.0, "softcap"),
        ("scoring_func", "sqrtsoftplus", "sqrtsoftplus_router"),
        ("attn_output_gate", True, "output_gate"),
        ("quantization_config", {"quant_method": "fp8"}, "dequantise"),
    ],
)
def test_a_key_hints_at_an_operator_that_is_lacking(
    key: str, value: object, operator: str, known: dict[str, KnownPort]
) -> None:
    older = without(known, "nemotron_h", "qwen3_next")
    assert recognise({"model_type": "x", key: value}, known=older).lacking_operators == (operator,)


@pytest.mark.parametrize(
    ("tensor", "meaning", "operator"),
    [
        ("backbone.layers.0.mixer.D", "state-space recurrence (Mamba-2)", "mamba2"),
        ("model.layers.3.mlp_res_proj.weight", "attention over the outputs of earlier blocks", "attn_res"),
        ("layers.0.attn.compressor.ape", "compressed keys and values", "compressed_attention"),
        ("model.layers.1.mlp.shared_expert_gate.weight", "gate on the shared expert", "shared_gate"),
        ("model.layers.1.mlp.gate.tid2eid", "experts from a table by token", "token_table_router"),
        ("model.layers.1.self_attn.q_b_proj.weight_scale_inv", "quantised checkpoint", "dequantise"),
    ],
)
def test_a_tensor_name_hints_at_an_operator_that_is_lacking(
    tensor: str, meaning: str, operator: str, known: dict[str, KnownPort]
) -> None:
    found = recognise({"model_type": "x"}, [tensor], known=without(known, "nemotron_h", "qwen3_next"))
    assert meanings(found)[meaning] == (f"tensor {numbered(tensor)}",)
    assert operator in found.lacking_operators
    assert found.uncovered_patterns == (numbered(tensor),)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("qwen3_next", ()),
        ("qwen3_5_moe", ()),
        ("nemotron_h", ()),
        ("deepseek_v4", ("compressed_attention", "grouped_output", "sqrtsoftplus_router", "token_table_router")),
    ],
)
def test_of_a_model_without_a_port_only_operators_that_nobody_wrote_are_lacking(
    name: str, lacking: tuple[str, ...], known: dict[str, KnownPort], tiny: Callable[[str], Path], table: OperatorTable
) -> None:
    with safe_open(tiny(name) / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    raw = json.loads((tiny(name) / "config.json").read_text())
    found = recognise(raw, names, known=without(known, name), operators=table.names())
    assert found.lacking_operators == lacking


@pytest.mark.parametrize(
    ("raw", "tensors", "meaning"),
    [
        ({}, ["model.layers.3.linear_attn.in_proj_qkvz.weight"], "q, k, v, z grouped per key head"),
        ({}, ["model.layers.3.linear_attn.in_proj_qkv.weight"], "q, k, v beside z, b, a"),
        (
            {"moe_latent_size": 32},
            ["backbone.layers.1.mixer.fc1_latent_proj.weight"],
            "experts of a narrower latent width",
        ),
        ({"mlp_hidden_act": "relu2"}, [], "squared ReLU, no gate"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, [], "GELU by its tanh approximation"),
        ({"attn_output_gate": True}, ["model.layers.3.self_attn.g_proj.weight"], "gate on the output of attention"),
        ({}, ["model.layers.1.mlp.shared_expert_gate.weight"], "gate on the shared expert"),
    ],
)
def test_what_the_vocabulary_has_is_recognised_and_nothing_is_lacking(
    raw: dict[str, Any], tensors: list[str], meaning: str, known: dict[str, KnownPort], table: OperatorTable
) -> None:
    found = recognise({"model_type": "x", **raw}, tensors, known=known, operators=table.names())
    sources = [f"{key} = {value}" for key, value in raw.items()] + [f"tensor {numbered(name)}" for name in tensors]
    assert meanings(found)[meaning] == tuple(sources)
    assert (found.lacking_operators, found.unrecognised) == ((), ())


def test_sinks_are_recognised_and_no_port_covers_them(known: dict[str, KnownPort]) -> None:
    found = recognise({"model_type": "x"}, ["model.layers.0.self_attn.sinks"], known=known)
    assert meanings(found) == {"learned sinks in the softmax": ("tensor model.layers.{n}.self_attn.sinks",)}
    assert found.uncovered_patterns == ("model.layers.{n}.self_attn.sinks",)


@pytest.mark.parametrize(("on", "found"), [(True, True), (False, False)])
def test_a_window_that_is_switched_off_is_not_found(on: bool, found: bool, known: dict[str, KnownPort]) -> None:
    raw = {"model_type": "x", "use_sliding_window": on, "sliding_window": 128}
    assert ("sliding window" in meanings(recognise(raw, known=known))) is found


def test_a_state_space_model_is_not_taken_for_a_delta_rule(known: dict[str, KnownPort]) -> None:
    raw = {
        "model_type": "x",
        "layers_block_type": ["mamba", "moe"],
        "ssm_state_size": 16,
        "layer_types": ["linear_attention"],
    }
    found = recognise(raw, known=known)
    assert "state-space recurrence (Mamba-2)" in meanings(found)
    assert "gated delta rule, decay per channel (KDA)" not in meanings(found)


def test_a_state_space_and_its_layers_by_letter_are_recognised(
    known: dict[str, KnownPort], table: OperatorTable
) -> None:
    sizes = {"mamba_num_heads": 64, "mamba_head_dim": 32, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    raw = {"model_type": "x", **sizes, "mamba_hidden_act": "silu", "hybrid_override_pattern": "ME*-"}
    found = recognise(raw, ["backbone.layers.0.mixer.in_proj.weight"], known={}, operators=table.names())
    assert (found.unrecognised, found.lacking_operators) == ((), ())
    told = meanings(found)
    assert told["layers of one operation"] == ("hybrid_override_pattern = ME*-",)
    assert told["groups and short convolution of a recurrence"] == ("n_groups = 8", "conv_kernel = 4")
    assert "recurrent state of 64 x 32 x 128 values per sequence" in told
    lacking = recognise(raw, known=without(known, "nemotron_h")).lacking_operators
    assert lacking == ("mamba2",)


def test_layers_beyond_the_counted_ones_and_skipped_towers_are_no_gaps(known: dict[str, KnownPort]) -> None:
    names = ["model.layers.4.eh_proj.weight", "model.visual.blocks.0.weight"]
    found = recognise({"model_type": "x", "num_hidden_layers": 4}, names, known=known)
    assert meanings(found)["layers beyond num_hidden_layers"] == ("tensors layers.4.*",)
    assert found.uncovered_patterns == ()


def test_spellings_of_one_fact_count_once_in_the_likeness(known: dict[str, KnownPort]) -> None:
    raw = card("qwen3-30b-a3b")
    respelled = {"num_local_experts" if key == "num_experts" else key: value for key, value in raw.items()}
    one, other = (recognise(config, known=known).nearest for config in (raw, respelled))
    assert one is not None
    assert one == other


def test_likeness_is_shared_over_all() -> None:
    assert jaccard({"a", "b"}, {"b", "c"}) == pytest.approx(1 / 3)
    assert jaccard(set(), set()) == 0.0
    assert jaccard({"a"}, {"a"}) == 1.0


def test_likeness_lists_what_is_shared_and_what_is_not(known: dict[str, KnownPort]) -> None:
    near = recognise(HYBRID, ["lm_head.weight", "model.layers.0.odd.weight"], known=known).nearest
    assert near is not None
    assert near.tensor_score is not None
    assert near.score == pytest.approx((near.key_score + near.tensor_score) / 2, abs=1e-4)
    assert "kv_lora_rank" in near.shared_keys
    assert "frobnicate" in near.only_here
    assert near.patterns_only_here == ("layers.{n}.odd.weight",)
    assert "rms_norm_eps" in near.only_there


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.12.mlp.experts.7.up_proj.weight", "layers.{n}.mlp.experts.{n}.up_proj.weight"),
        ("language_model.model.layers.0.self_attn.A_log", "layers.{n}.self_attn.A_log"),
        ("model.language_model.norm.weight", "norm.weight"),
        ("model.layers.0.self_attn.q_conv1d.weight", "layers.{n}.self_attn.q_conv1d.weight"),
    ],
)
def test_a_pattern_drops_containers_and_numbers(name: str, pattern: str) -> None:
    assert tensor_pattern(name) == pattern


def test_without_known_ports_nothing_is_nearest() -> None:
    found = recognise(HYBRID, known={})
    assert (found.nearest, found.ranking) == (None, ())
    assert "mla" in found.lacking_operators


def test_evidence_prints_and_serialises(known: dict[str, KnownPort]) -> None:
    found = recognise(HYBRID, known=known)
    text = str(found)
    assert "unrecognised: linear_attn_config.new_switch = True" in text
    assert "operators lacking: " in text
    assert json.loads(json.dumps(found.to_dict()))["model_type"] == "unheard_of"


def test_tensors_are_shown_as_the_checkpoint_spells_them(known: dict[str, KnownPort]) -> None:
    found = recognise({"model_type": "x"}, ["transformer.h.0.odd.weight", "transformer.h.1.odd.weight"], known=known)
    assert found.unrecognised == ("tensor transformer.h.{n}.odd.weight",)
    assert found.uncovered_patterns == ("transformer.h.{n}.odd.weight",)


def test_what_nobody_recognises_is_printed_once(known: dict[str, KnownPort]) -> None:
    names = ["transformer.h.0.odd.weight"]
    text = str(recognise({**HYBRID, "novelty": {"a": 1}}, names, known=known))
    unread = next(line for line in text.splitlines() if line.startswith("keys no port reads"))
    assert unread == "keys no port reads: attn_res_block_size, routed_expert_hidden_size"
    for word in ("frobnicate", "novelty", "transformer.h.{n}.odd.weight"):
        assert text.count(word) == 1
