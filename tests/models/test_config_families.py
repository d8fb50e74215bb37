"""Facts of single families: per-layer schedules, index modes, rotary positions, decay, groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reference_configs import Raw, changed, declare, lacking, refusal, tiny_config

from firstlight.errors import FirstlightError
from firstlight.spec.arch import HyperConnections
from firstlight.spec.cards import card
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, MLAttention
from firstlight.spec.norm import LinearScaling, Llama3Scaling, Rope, Yarn

YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_kimi_lists_count_from_one_and_cover_each_layer_once() -> None:
    lists = {"kda_layers": [1, 3, 5], "full_attn_layers": [2, 4]}
    raw = {**lacking("kimi_linear", "layer_types"), "linear_attn_config": lists}
    kinds = [isinstance(layer.mixer, DeltaRule) for layer in declare(raw).layers]
    assert kinds == [True, False, True, False, True]
    for wrong in (
        {**lists, "full_attn_layers": [2]},
        {**lists, "full_attn_layers": [2, 3, 4]},
        {**lists, "kda_layers": [0, 3, 5]},
    ):
        assert "do not cover each layer once" in refusal({**raw, "linear_attn_config": wrong}).what


def test_kimi_without_lists_has_full_attention_at_every_fourth_layer_but_the_first() -> None:
    raw = {**lacking("kimi_linear", "layer_types", "mlp_layer_types"), "num_hidden_layers": 9}
    full = [i for i, layer in enumerate(declare(raw).layers) if isinstance(layer.mixer, MLAttention)]
    assert full == [4, 8]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "glm5_next"])
def test_an_index_may_keep_more_tokens_than_the_context_holds(name: str) -> None:
    layers = declare(changed(name, index_topk=8192)).layers
    assert {
        layer.mixer.indexer.topk for layer in layers if isinstance(layer.mixer, MLAttention) and layer.mixer.indexer
    } == {8192}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full", "full"]}),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "SFFFF"}),
        ("glm5_next", {"indexer_types": ["shared"] * 8}),
    ],
)
def test_a_first_layer_cannot_share_a_selection(name: str, changes: Raw) -> None:
    assert "first layer cannot share" in refusal(changed(name, **changes)).what


def test_an_indexed_layer_cannot_share_the_selection_of_a_recurrent_one() -> None:
    kinds = ["full"] * 3 + ["shared"] + ["full"] * 4
    assert refusal(changed("glm5_next", indexer_types=kinds)).what.startswith("layer 3 shares an index selection")


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({"index_topk_pattern": "FSFSSF"}, "FSFSS"),
        ({"index_topk_freq": 3}, "FFSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSF"),
        ({}, "FFFFF"),
        ({"indexer_types": ["full", "shared"] * 3, "index_topk_pattern": "FFFFF"}, "FSFSF"),
    ],
)
def test_shared_selections_come_from_list_pattern_or_frequency(changes: Raw, modes: str) -> None:
    layers = declare({**lacking("glm_moe_dsa", "indexer_types"), **changes}).layers
    found = [
        layer.mixer.indexer.mode for layer in layers if isinstance(layer.mixer, MLAttention) and layer.mixer.indexer
    ]
    assert found == [{"F": "full", "S": "shared"}[letter] for letter in modes]


@pytest.mark.parametrize(("name", "default"), [("deepseek_v32", "half"), ("glm_moe_dsa", "interleave")])
@pytest.mark.parametrize(("flag", "layout"), [(True, "interleave"), (False, "half"), (None, None)])
def test_the_index_layout_follows_its_flag_else_the_family(
    name: str, default: str, flag: bool | None, layout: str | None
) -> None:
    mixer = declare(changed(name, indexer_rope_interleave=flag)).layers[0].mixer
    assert isinstance(mixer, MLAttention)
    assert mixer.indexer is not None
    assert mixer.indexer.rope is not None
    assert mixer.indexer.rope.layout == (layout or default)
    assert mixer.rope is not None
    assert mixer.rope.layout == "interleave"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(("flag", "layout"), [(True, "interleave"), (False, "half"), (None, "interleave")])
def test_the_main_layout_follows_its_flag_and_leaves_the_index_alone(name: str, flag: bool | None, layout: str) -> None:
    plain, mixer = (declare(raw).layers[0].mixer for raw in (changed(name), changed(name, rope_interleave=flag)))
    assert isinstance(mixer, MLAttention)
    assert isinstance(plain, MLAttention)
    assert mixer.rope is not None
    assert mixer.rope.layout == layout
    assert mixer.indexer == plain.indexer


def rope_of(**changes: Any) -> Rope | None:
    """Return the rotary positions of a tiny llama whose rope_parameters are replaced."""
    mixer = declare({**lacking("llama", "rope_parameters"), **changes}).layers[0].mixer
    assert isinstance(mixer, GQAttention)
    return mixer.rope


def test_rotary_scalings_are_the_same_in_both_spellings() -> None:
    old = rope_of(rope_theta=5e5, rope_scaling={"type": "yarn", **YARN})
    new = rope_of(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **YARN})
    scaling = Yarn(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    assert old == new == Rope(theta=5e5, dim=16, layout="half", scaling=scaling)
    low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama3 = rope_of(rope_scaling={"rope_type": "llama3", "factor": 8.0, **low_high})
    expected = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    assert llama3 == Rope(theta=10000.0, dim=16, scaling=expected)
    linear = rope_of(rope_scaling={"type": "linear", "factor": 2})
    assert linear == Rope(theta=10000.0, dim=16, scaling=LinearScaling(factor=2.0))


def test_rotary_scaling_without_original_positions_takes_the_context() -> None:
    found = rope_of(rope_scaling={"type": "yarn", "factor": 4.0})
    assert found is not None
    assert found.scaling == Yarn(factor=4.0, original_max_position=4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "config.json lacks rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor must be float"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "betafast": 1}}, "rope_scaling has unknown keys: betafast"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "config.json lacks rope_scaling.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters has unknown keys: factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor=0.1 rotates 1 of 16 dimensions"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5 rotates 24 of 16"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_rotary_parameters_that_are_not_understood_are_refused(changes: Raw, message: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        rope_of(**changes)
    assert caught.value.what.startswith(message)


def test_a_whole_head_may_be_named_as_rotated() -> None:
    assert rope_of(partial_rotary_factor=1.0) == rope_of()


@pytest.mark.parametrize(
    "changes", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_a_part_of_the_head_rotates_in_either_spelling(changes: Raw) -> None:
    found = rope_of(**changes)
    assert found is not None
    assert found.dim == 8


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v32", {"mlp_bias": True}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
        ("glm5_next", {"qk_rope_head_dim": 64}),
    ],
)
def test_a_variant_that_a_port_was_not_written_for_is_refused(name: str, changes: Raw) -> None:
    ((key, value),) = changes.items()
    assert refusal(changed(name, **changes)).what == f"{key} = {value!r} is not supported"


def test_absent_expert_groups_take_the_defaults_of_the_family() -> None:
    raw = {**lacking("deepseek_v3", "n_group", "topk_group"), "n_routed_experts": 64}
    ffn = declare(raw).layers[-1].ffn
    assert isinstance(ffn, MoE)
    assert (ffn.router.num_groups, ffn.router.topk_groups) == (8, 4)


def test_experts_start_and_repeat_where_the_counts_say() -> None:
    raw = changed("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=1, moe_layer_freq=2)
    assert [isinstance(layer.ffn, MoE) for layer in declare(raw).layers] == [False, False, True, False, True, False]
    raw = changed("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [isinstance(layer.ffn, GLU) for layer in declare(raw).layers] == [True, False, True, True, True, False]


def test_lists_may_be_longer_than_the_model_that_is_cut_from_them() -> None:
    whole = declare(tiny_config("glm5_next"))
    assert declare(changed("glm5_next", num_hidden_layers=4)) == replace(whole, layers=whole.layers[:4])


def test_windows_start_where_the_config_says() -> None:
    raw = {**lacking("qwen3", "layer_types"), "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    mixers = [layer.mixer for layer in declare(raw).layers]
    assert [mixer.sliding_window for mixer in mixers if isinstance(mixer, GQAttention)] == [None, None, None, 8]
    off = declare({**raw, "use_sliding_window": False})
    assert all(isinstance(layer.mixer, GQAttention) and layer.mixer.sliding_window is None for layer in off.layers)


@pytest.mark.parametrize(
    ("bound", "table", "expected"),
    [
        ("absent", None, -5.0),
        (-3.0, None, -3.0),
        (None, None, None),
        (None, {"safe_gate": False}, None),
        (None, {"safe_gate": True}, -5.0),
        (None, {"head_dim": 16}, -5.0),
        (None, {"gate_lower_bound": -2.0}, -2.0),
        ("absent", {"gate_lower_bound": -2.0}, -2.0),
    ],
)
def test_the_bound_of_the_decay(bound: float | str | None, table: Raw | None, expected: float | None) -> None:
    raw = lacking("glm5_next", "linear_lower_bound") | ({} if bound == "absent" else {"linear_lower_bound": bound})
    mixer = declare(raw | ({} if table is None else {"linear_attn_config": table})).layers[0].mixer
    assert isinstance(mixer, DeltaRule)
    assert mixer.decay.lower_bound == expected
    assert mixer.decay.form == ("softplus" if expected is None else "bounded")


@pytest.mark.parametrize(
    ("name", "eps"),
    [("deepseek_v3", 1e-6), ("deepseek_v32", 1e-6), ("glm_moe_dsa", 1e-6), ("kimi_linear", 1e-6), ("glm5_next", 3e-4)],
)
def test_the_latent_norm_has_an_eps_of_its_own_in_all_families_but_one(name: str, eps: float) -> None:
    arch = declare(changed(name, rms_norm_eps=3e-4))
    assert arch.norm.eps == 3e-4
    assert {layer.mixer.latent_norm_eps for layer in arch.layers if isinstance(layer.mixer, MLAttention)} == {eps}


def test_yarn_scales_the_softmax_of_latent_attention() -> None:
    mixer = declare(card("deepseek-v3.2")).layers[0].mixer
    assert isinstance(mixer, MLAttention)
    assert mixer.scaling == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)  # 0.1 ln 40 + 1


def test_hyper_connections_are_read() -> None:
    residual = declare(changed("glm5_next", hc_mult=2, hc_sinkhorn_iters=7, hc_eps=1e-4, rms_norm_eps=2e-5)).residual
    assert residual == HyperConnections(mult=2, sinkhorn_iters=7, eps=1e-4, norm_eps=2e-5)
