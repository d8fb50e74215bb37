"""config.json -> ArchSpec: two spellings of one model, and what is refused."""

from __future__ import annotations

import json

import pytest
from reference_configs import CARDS, TINY, Raw, build_config, changed, declare, lacking, refusal, tiny_config, written

from firstlight.errors import EXIT_MISSING_OPERATORS, EXIT_USAGE, FirstlightError
from firstlight.models.declare import read_arch
from firstlight.models.registry import find_port
from firstlight.spec.arch import ArchSpec
from firstlight.spec.cards import card
from firstlight.spec.mixers import GQAttention
from firstlight.spec.read import text_config

LINEAR_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}


def outcome(raw: Raw) -> ArchSpec | str:
    """Return the ArchSpec of a config.json, or what is wrong with it."""
    try:
        return declare(raw)
    except FirstlightError as error:
        return error.what


def released(raw: Raw) -> Raw:
    """Return a config.json as releases spell it: rotary keys at top level, counts and 1-indexed lists for lists."""
    raw = dict(raw)
    if "dtype" in raw:
        raw["torch_dtype"] = raw.pop("dtype")
    if rope := raw.pop("rope_parameters", None):
        raw["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        if "partial_rotary_factor" in rope:
            raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        raw["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    if kinds := raw.pop("mlp_layer_types", None):
        raw |= {"first_k_dense_replace": kinds.count("dense"), "moe_layer_freq": 1}
    if "n_routed_experts" in raw:
        raw["num_experts"] = raw.pop("n_routed_experts")
    if "linear_head_dim" in raw:
        table = {nested: raw.pop(key) for key, nested in LINEAR_SIZES.items() if key in raw}
        kinds = raw.pop("layer_types")
        numbered = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
        if "indexed_attention" in kinds:
            raw["layer_types"], numbered = kinds, {}
        lists = {key: [i + 1 for i, kind in enumerate(kinds) if kind == word] for key, word in numbered.items()}
        raw["linear_attn_config"] = {**table, **lists}
    if "linear_num_key_heads" in raw:
        raw["full_attention_interval"] = raw.pop("layer_types").index("full_attention") + 1
    if words := raw.pop("layers_block_type", None):
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        raw |= {"hybrid_override_pattern": "".join(letters[word] for word in words), "num_hidden_layers": len(words)}
    return raw


@pytest.mark.parametrize("name", TINY)
def test_both_spellings_declare_the_same_model(name: str) -> None:
    raw = tiny_config(name)
    nested = raw.get("text_config")
    respelled = released(raw) if nested is None else {**raw, "text_config": released(nested)}
    assert respelled != raw
    assert declare(respelled) == declare(raw)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_and_what_transformers_makes_of_it_declare_the_same_model(name: str) -> None:
    raw = card(name)
    arguments = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    rewritten = written(build_config(CARDS[name][0], arguments))
    assert rewritten.keys() != raw.keys()
    assert declare(rewritten) == declare(raw)


def test_a_text_tower_is_read_nested_alone_and_under_its_own_name() -> None:
    nested = tiny_config("glm5_next")
    alone = text_config({key: nested[key] for key in ("dtype", "text_config") if key in nested})
    alone["model_type"] = nested["text_config"]["model_type"]
    assert alone["model_type"] == "glm5_next_text"
    assert declare(alone) == declare({**alone, "model_type": "glm5_next"}) == declare(nested)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 9999), ("hc_mult", 0), ("index_kpool", 7)])
def test_a_key_beside_the_tower_that_contradicts_it_is_refused(key: str, value: int) -> None:
    raw = tiny_config("glm5_next")
    assert refusal({**raw, key: value}).what == f"{key} and text_config.{key} contradict each other"
    assert declare({**raw, key: raw["text_config"][key]}) == declare(raw)


@pytest.mark.parametrize("key", ["dtype", "transformers_version", "architectures", "eos_token_id"])
def test_bookkeeping_beside_the_tower_may_differ_and_the_tower_wins(key: str) -> None:
    raw = tiny_config("glm5_next")
    nested = {**raw, "text_config": {**raw["text_config"], key: "bfloat16"}}
    assert declare({**nested, key: "float32"}) == declare({**nested, key: "bfloat16"})


@pytest.mark.parametrize(
    ("name", "key", "alias"),
    [
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_experts"),
        ("kimi_linear", "num_experts", "n_routed_experts"),
        ("kimi_linear", "num_experts_per_token", "num_experts_per_tok"),
        ("kimi_linear", "num_shared_experts", "n_shared_experts"),
        ("kimi_linear", "moe_renormalize", "norm_topk_prob"),
        ("kimi_linear", "num_expert_group", "n_group"),
        ("kimi_linear", "model_max_length", "max_position_embeddings"),
        ("llama", "dtype", "torch_dtype"),
    ],
)
def test_aliases_spell_one_fact_and_two_that_disagree_are_refused(name: str, key: str, alias: str) -> None:
    raw = text_config(tiny_config(name))
    renamed = {alias if k == key else k: value for k, value in raw.items()}
    assert declare(renamed) == declare(raw)
    assert declare({**raw, alias: raw[key]}) == declare(raw)
    other = not raw[key] if isinstance(raw[key], bool) else "float16" if key == "dtype" else raw[key] + 1
    message = refusal({**raw, alias: other}).what
    assert "contradict each other" in message
    assert key in message
    assert alias in message


@pytest.mark.parametrize("name", TINY)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(name: str) -> None:
    error = refusal(changed(name, num_hiden_layers_extra=1, hidden_sizes=64))
    assert error.what.startswith("config.json has 2 keys")
    assert "hidden_sizes (nearest known: hidden_size)" in error.where
    assert error.exit_code == EXIT_USAGE


def test_an_unknown_key_beside_the_text_tower_is_refused() -> None:
    assert "residual_gain" in refusal({**tiny_config("glm5_next"), "residual_gain": 2.0}).where


def test_unknown_keys_can_be_allowed_and_are_reported() -> None:
    raw = changed("llama", gadget=1, widget=None)
    arch, unknown = read_arch(raw, find_port("llama"), allow_unknown_keys=True)
    assert unknown == ("gadget",)
    assert arch == declare(lacking("llama"))


@pytest.mark.parametrize("name", TINY)
def test_null_counts_as_absent(name: str) -> None:
    """Every optional key may be null; a required one is then missing."""
    raw = text_config(tiny_config(name))
    # null turns the bound of the decay off, where absence takes the default
    for key in sorted(set(raw) - {"model_type", "linear_lower_bound"}):
        absent = {k: value for k, value in raw.items() if k != key}
        assert outcome({**raw, key: None}) == outcome(absent), key


def test_an_unknown_null_key_is_no_feature() -> None:
    assert declare(changed("llama", novelty=None)) == declare(lacking("llama"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "hidden_size"),
        ("llama", "num_hidden_layers"),
        ("llama", "vocab_size"),
        ("qwen3", "intermediate_size"),
        ("deepseek_v3", "kv_lora_rank"),
        ("deepseek_v3", "moe_intermediate_size"),
        ("kimi_linear", "qk_nope_head_dim"),
        ("deepseek_v32", "q_lora_rank"),
        ("glm5_next", "q_lora_rank"),
    ],
)
def test_a_missing_required_key_is_named(name: str, key: str) -> None:
    assert refusal(lacking(name, key)).what == f"config.json lacks {key}"


def test_a_missing_key_points_at_the_misspelled_one() -> None:
    raw = {("vocabulary_size" if key == "vocab_size" else key): value for key, value in lacking("llama").items()}
    assert refusal(raw).fix == "did you mean vocabulary_size?"


@pytest.mark.parametrize(
    ("name", "key", "value", "kind"),
    [
        ("llama", "hidden_size", "64", "int"),
        ("llama", "hidden_size", 64.0, "int"),
        ("llama", "num_hidden_layers", True, "int"),
        ("llama", "rms_norm_eps", "1e-5", "float"),
        ("llama", "attention_bias", 1, "bool"),
        ("llama", "rope_theta", [1], "float"),
        ("llama", "dtype", 16, "str"),
        ("deepseek_v3", "norm_topk_prob", "yes", "bool"),
        ("deepseek_v3", "q_lora_rank", [32], "int"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, key: str, value: object, kind: str) -> None:
    assert refusal(changed(name, **{key: value})).what == f"{key} must be {kind}, got {value!r}"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "glm_moe_dsa", "kimi_linear", "glm5_next"])
def test_no_value_brings_an_error_that_does_not_name_its_place(name: str) -> None:
    raw = changed(name, linear_attn_config={}) if "linear_head_dim" in changed(name) else changed(name)
    for key in sorted({*raw, "rope_scaling"} - {"model_type"}):
        for value in (
            "x",
            -1,
            0,
            10**400,
            3.5,
            [[1]],
            {"type": ["x"]},
            {"type": "yarn", "factor": []},
            {"head_dim": [1]},
            True,
        ):
            found = outcome({**raw, key: value})
            assert isinstance(found, ArchSpec) or not found.startswith("the port of"), (key, value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must list whole numbers"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers[0] must be int"),
        ("llama", {"rope_parameters": "default"}, "rope_parameters must be an object"),
        ("kimi_linear", {"layer_types": "linear_attention"}, "layer_types must list 5 layers"),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4}, "layer_types must list 5 layers"),
        ("kimi_linear", {"layer_types": ["mamba"] * 5}, "layer_types[0] = 'mamba' is not known"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": "16"}}, "linear_attn_config.head_dim must be int"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": "all"}}, "linear_attn_config.kda_layers must list"),
        ("glm5_next", {"linear_attn_config": {"gate_lower_bound": "low"}}, "linear_attn_config.gate_lower_bound must"),
        ("llama", {"hidden_size": 0}, "hidden_size must be positive"),
        ("deepseek_v3", {"kv_lora_rank": -1}, "kv_lora_rank must be positive"),
        ("kimi_linear", {"linear_num_heads": 0}, "linear_num_heads must be positive"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FX"}, "index_topk_pattern = 'FX'"),
    ],
)
def test_a_value_without_meaning_is_refused(name: str, changes: Raw, message: str) -> None:
    assert refusal(changed(name, **changes)).what.startswith(message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (
            "llama",
            {"head_dim": None, "hidden_size": 66},
            "hidden_size=66 is not a multiple of num_attention_heads=4",
        ),
        ("qwen3_moe", {"num_key_value_heads": 8}, "num_attention_heads=4 is not a multiple of num_key_value_heads=8"),
        ("deepseek_v3", {"n_group": 3}, "num_experts=8 is not a multiple of n_group=3"),
        ("glm5_next", {"index_kpool": 3}, "index_topk=16 is not a multiple of index_kpool=3"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group=3 exceeds n_group=2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds the experts of topk_group groups=4"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, changes: Raw, message: str) -> None:
    assert refusal(changed(name, **changes)).what == message


def test_a_head_width_of_its_own_need_not_divide_the_hidden_size() -> None:
    mixer = declare(changed("llama", hidden_size=66)).layers[0].mixer
    assert isinstance(mixer, GQAttention)
    assert mixer.head_dim == 16


@pytest.mark.parametrize(
    ("name", "changes", "spellings"),
    [
        (
            "deepseek_v32",
            {"first_k_dense_replace": 2},
            ("mlp_layer_types", "first_k_dense_replace"),
        ),
        (
            "kimi_linear",
            {"linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [5]}},
            ("layer_types", "linear_attn_config.kda_layers"),
        ),
        (
            "kimi_linear",
            {"linear_attn_config": {"head_dim": 32}},
            ("linear_head_dim", "linear_attn_config.head_dim"),
        ),
        (
            "glm5_next",
            {"linear_attn_config": {"gate_lower_bound": -4.0}},
            ("linear_lower_bound", "linear_attn_config.gate_lower_bound"),
        ),
        ("llama", {"rope_theta": 5e5}, ("rope_theta", "rope_parameters")),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_parameters", "rope_scaling")),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            ("rope_parameters.type", "rope_parameters.rope_type"),
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            ("layer_types", "use_sliding_window"),
        ),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(name: str, changes: Raw, spellings: tuple[str, str]) -> None:
    message = refusal(changed(name, **changes)).what
    assert message.endswith("contradict each other")
    assert all(spelling in message for spelling in spellings)


def test_spellings_that_agree_are_accepted() -> None:
    both = {
        "linear_attn_config": {"head_dim": 16, "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]},
        "first_k_dense_replace": 2,
    }
    assert declare(changed("kimi_linear", **both)) == declare(tiny_config("kimi_linear"))


def test_an_unknown_key_in_a_nested_object_is_refused() -> None:
    error = refusal(changed("kimi_linear", linear_attn_config={"head_dims": 16}))
    assert error.what == "linear_attn_config has unknown keys: head_dims"
    assert error.fix == "did you mean head_dim?"


@pytest.mark.parametrize("name", ["llama", "glm5_next"])
def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_format(name: str) -> None:
    raw = {**tiny_config(name), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    error = refusal(raw)
    assert error.what == "quantised checkpoint: fp8"
    assert "quantization_config" in error.where
    assert refusal({**raw, "quantization_config": {"bits": 4}}).what == "quantised checkpoint: unnamed"
    assert declare({**raw, "quantization_config": None}) == declare(tiny_config(name))


def test_nobody_knows_an_unheard_of_model() -> None:
    with pytest.raises(FirstlightError, match="no port for model_type 'llamas'") as caught:
        find_port("llamas")
    assert caught.value.exit_code == EXIT_MISSING_OPERATORS
    assert "nearest in name: llama" in caught.value.fix


def test_reading_leaves_the_config_as_it_was() -> None:
    for name in TINY:
        raw = tiny_config(name)
        before = json.dumps(raw)
        declare(raw)
        assert json.dumps(raw) == before
