"""What a draft derives from keys, names and shapes, and what it leaves open. No class in transformers helps here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from port.made import (
    ATTENTION,
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER,
    MLP,
    NORMS,
    OUTSIDE,
    VOCAB,
    WIDTH,
    Shapes,
    drafted,
    folder,
)

from firstlight.engine.assemble import declare
from firstlight.errors import FirstlightError
from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.port.draft import Draft, draft
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2, MLAttention, OutputGate
from firstlight.spec.norm import Norm
from firstlight.spec.noun import NewNoun, Nothing
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import resolve
from firstlight.weights.source import locate

EXPERTS = {f"mlp.experts.{e}.{name}": (16, HIDDEN) for e in range(4) for name in ("gate_proj.weight", "up_proj.weight")}
EXPERTS |= {f"mlp.experts.{e}.down_proj.weight": (HIDDEN, 16) for e in range(4)}
MOE = {**ATTENTION, **NORMS, **EXPERTS, "mlp.gate.weight": (4, HIDDEN)}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def attention(made: Draft, layer: int = 0) -> GQAttention:
    """Return the attention of a drafted layer."""
    assert made.arch is not None, made.why
    mixer = made.arch.layers[layer].mixer
    assert isinstance(mixer, GQAttention)
    return mixer


def experts(made: Draft, layer: int = 0) -> MoE:
    """Return the experts of a drafted layer."""
    assert made.arch is not None, made.why
    ffn = made.arch.layers[layer].ffn
    assert isinstance(ffn, MoE)
    return ffn


def fits(made: Draft, where: Path) -> bool:
    """Return whether every tensor of the folder has a place and every parameter a tensor."""
    assert made.arch is not None
    assert made.port is not None
    names = made.port.names.at(len(made.arch.layers))
    with Checkpoint.open(where) as checkpoint:
        plan = resolve(targets(Decoder.build(made.arch, torch.float32)), names, checkpoint)
    return not (plan.missing or plan.unexpected or plan.mismatched)


def test_sizes_are_read_from_the_keys_that_agree_with_the_shapes(tmp_path: Path) -> None:
    made = drafted(tmp_path / "m")
    mixer = attention(made)
    assert (mixer.num_attention_heads, mixer.num_key_value_heads, mixer.head_dim) == (HEADS, KV_HEADS, DIM)
    assert 'head_dim=cfg.positive("head_dim")' in made.text
    assert fits(made, tmp_path / "m")


def test_a_size_that_no_key_has_is_the_number_that_the_shapes_show(tmp_path: Path) -> None:
    made = drafted(tmp_path / "m", head_dim=None, intermediate_size=50)
    assert attention(made).head_dim == DIM
    assert made.arch is not None
    ffn = made.arch.layers[0].ffn
    assert isinstance(ffn, GLU)
    assert ffn.intermediate_size == WIDTH
    assert any("intermediate_size: none agrees" in guess for guess in made.guesses())
    assert fits(made, tmp_path / "m")


def test_biases_are_declared_where_there_are_tensors(tmp_path: Path) -> None:
    biased = {**LAYER, **{f"self_attn.{p}_proj.bias": (LAYER[f"self_attn.{p}_proj.weight"][0],) for p in "qkv"}}
    made = drafted(tmp_path / "m", biased, biased)
    assert (attention(made).bias, attention(made).out_bias) == (True, False)
    assert fits(made, tmp_path / "m")


def test_a_doubled_query_projection_is_a_gate_and_its_norm_tells_the_head(tmp_path: Path) -> None:
    norms = {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
    gated = {**LAYER, "self_attn.q_proj.weight": (2 * HEADS * DIM, HIDDEN), **norms}
    made = drafted(tmp_path / "m", gated, head_dim=None)
    assert attention(made).output_gate == OutputGate(act="sigmoid", source="q_proj")
    assert attention(made).qk_norm == Norm(eps=1e-5)
    assert fits(made, tmp_path / "m")


def test_no_rotary_key_means_no_rotation(tmp_path: Path) -> None:
    made = drafted(tmp_path / "m", rope_theta=None)
    assert attention(made).rope is None
    assert any("no rotary parameters" in guess for guess in made.guesses())


def test_windows_go_to_the_layers_that_a_list_names(tmp_path: Path) -> None:
    made = drafted(tmp_path / "m", layer_types=["sliding_attention", "full_attention"], sliding_window=7)
    assert [attention(made, layer).sliding_window for layer in (0, 1)] == [7, None]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, 'cfg.per_layer("mlp_layer_types"'),
        ({"first_k_dense_replace": 1}, "(mlp(cfg),) * first"),
        ({"sparse": {"dense_layers": [1]}}, 'cfg.section("sparse").integers("dense_layers")'),
        ({}, "kinds[kind]"),
    ],
)
def test_layers_are_told_apart_by_what_the_config_offers(tmp_path: Path, changes: dict[str, object], code: str) -> None:
    made = drafted(tmp_path / "m", LAYER, MOE, MOE, **ROUTED, **changes)
    assert made.arch is not None, made.why
    assert [type(layer.ffn) for layer in made.arch.layers] == [GLU, MoE, MoE]
    assert code in made.text
    assert made.unread == ()
    assert fits(made, tmp_path / "m")


def test_a_bias_on_the_choice_speaks_for_sigmoid_and_none_for_softmax(tmp_path: Path) -> None:
    plain = drafted(tmp_path / "a", MOE, **ROUTED)
    biased = drafted(tmp_path / "b", {**MOE, "mlp.gate.e_score_correction_bias": (4,)}, **ROUTED)
    assert (experts(plain).router.score, experts(plain).router.bias) == ("softmax", "none")
    assert (experts(biased).router.score, experts(biased).router.bias) == ("sigmoid", "selection")
    assert fits(biased, tmp_path / "b")


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_tensor_are_found_in_either_orientation(tmp_path: Path, transposed: bool) -> None:
    # 2 I = H: the first tensor is square, and the second one tells
    inner, gate_up, down = 16, (4, 2 * 16, HIDDEN), (4, HIDDEN, 16)
    turn = (lambda shape: (shape[0], shape[2], shape[1])) if transposed else (lambda shape: shape)
    fused = {"mlp.experts.gate_up_proj": turn(gate_up), "mlp.experts.down_proj": turn(down)}
    layer = {**ATTENTION, **NORMS, **fused, "mlp.gate.weight": (4, HIDDEN)}
    made = drafted(tmp_path / "m", layer, **ROUTED)
    assert experts(made).moe_intermediate_size == inner
    assert fits(made, tmp_path / "m")
    assert ("transpose=True" in made.text) == transposed


def test_other_spellings_and_containers_are_named(tmp_path: Path) -> None:
    words = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3"}
    words |= {"down_proj": "w2", "self_attn": "attention", "mlp": "feed_forward"}
    words |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    layer: Shapes = {}
    for name, shape in LAYER.items():
        layer[".".join(words.get(word, word) for word in name.split("."))] = shape
    outside = {"tok_embeddings.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN)}
    made = drafted(tmp_path / "m", layer, layer, outside=outside, prefix="")
    assert fits(made, tmp_path / "m")


def test_layers_beyond_the_count_and_other_towers_are_skipped_with_a_reason(tmp_path: Path) -> None:
    extra = {**OUTSIDE, "model.visual.blocks.0.proj.weight": (4, 4)}
    where = folder(tmp_path / "m", LAYER, LAYER, LAYER, outside=extra)
    made = draft(locate(str(where)))
    made_short = drafted(tmp_path / "n", LAYER, LAYER, LAYER, outside=extra, num_hidden_layers=2)
    assert fits(made, where)
    assert made_short.arch is not None
    assert len(made_short.arch.layers) == 2
    assert fits(made_short, tmp_path / "n")
    assert "extra_layers=MTP_LAYERS" in made_short.text


def test_keys_are_expected_ignored_or_left_open(tmp_path: Path) -> None:
    changes = {
        "attention_sink_size": 4,
        "use_surprise": False,
        "hidden_dropout_prob": 0.1,
        "num_nextn_predict_layers": 1,
    }
    made = drafted(tmp_path / "m", **changes)
    assert made.unread == ("attention_sink_size",)
    assert 'cfg.expect("use_surprise", False)' in made.text
    assert 'cfg.ignore("hidden_dropout_prob")  # training only' in made.text
    assert "# unread: attention_sink_size = 4" in made.text


def test_a_layer_of_one_operation_has_nothing_in_the_other_place(tmp_path: Path) -> None:
    def alone(block: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {"norm.weight": (HIDDEN,), **{f"mixer.{name.partition('.')[2]}": s for name, s in block.items()}}

    made = drafted(tmp_path / "m", alone(ATTENTION), alone(MLP), layer_types=["attention", "mlp"])
    assert made.arch is not None
    assert [type(layer.mixer) for layer in made.arch.layers] == [GQAttention, Nothing]
    assert [type(layer.ffn) for layer in made.arch.layers] == [Nothing, GLU]
    assert fits(made, tmp_path / "m")


def test_what_no_noun_has_becomes_a_noun_with_its_tensors_and_an_operator(tmp_path: Path) -> None:
    strange = {
        "mixer.in_proj.weight": (3 * HIDDEN, HIDDEN),
        "mixer.A_log": (HEADS,),
        "mixer.conv1d.weight": (HIDDEN, 1, 4),
    }
    made = drafted(tmp_path / "m", {**strange, **MLP, **NORMS}, LAYER, state_size=16)
    assert made.arch is not None
    assert made.port is not None
    noun = made.arch.layers[0].mixer
    assert isinstance(noun, NewNoun)
    shapes = {weight.name: weight.shape for weight in noun.weights(HIDDEN)}
    assert shapes == {"in_proj.weight": (3 * HIDDEN, HIDDEN), "A_log": (HEADS,), "conv1d.weight": (HIDDEN, 4)}
    assert {*noun.operators()} <= {*made.port.operators().names()}
    assert made.text.count("# todo: ") == 3
    assert "state_size" in made.unread
    assert fits(made, tmp_path / "m")


def test_latent_attention_and_delta_rule_are_drafted_without_a_reference(tmp_path: Path) -> None:
    latent = {
        "self_attn.q_proj.weight": (HEADS * 12, HIDDEN),
        "self_attn.kv_a_proj_with_mqa.weight": (16 + 4, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (HEADS * (8 + 6), 16),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 6),
    }
    delta: Shapes = {f"self_attn.{p}_proj.weight": (HEADS * 8, HIDDEN) for p in "qkv"}
    delta |= {f"self_attn.{p}_conv1d.weight": (HEADS * 8, 1, 4) for p in "qkv"}
    delta |= {"self_attn.A_log": (HEADS,), "self_attn.dt_bias": (HEADS * 8,), "self_attn.o_norm.weight": (8,)}
    delta |= {"self_attn.b_proj.weight": (HEADS, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, HEADS * 8)}
    for gate in "fg":
        delta |= {f"self_attn.{gate}_a_proj.weight": (8, HIDDEN), f"self_attn.{gate}_b_proj.weight": (HEADS * 8, 8)}
    where = folder(tmp_path / "m", {**latent, **MLP, **NORMS}, {**delta, **MLP, **NORMS}, head_dim=None)
    made = draft(locate(str(where)))
    assert made.arch is not None
    first, second = (layer.mixer for layer in made.arch.layers)
    assert isinstance(first, MLAttention)
    assert (first.kv_lora_rank, first.qk_nope_head_dim, first.qk_rope_head_dim, first.v_head_dim) == (16, 8, 4, 6)
    assert isinstance(second, DeltaRule)
    assert (second.head_k_dim, second.head_v_dim, second.decay.granularity, second.decay.rank) == (8, 8, "channel", 8)
    assert fits(made, where)


# 4 heads of 10 channels, 2 groups, states of 6
SPACE: Shapes = {
    "mixer.in_proj.weight": (40 + 64 + 4, HIDDEN),
    "mixer.conv1d.weight": (64, 1, 3),
    "mixer.A_log": (4,),
    "mixer.D": (4,),
    "mixer.dt_bias": (4,),
    "mixer.norm.weight": (40,),
    "mixer.out_proj.weight": (HIDDEN, 40),
}
SPACE_KEYS = {"mamba_num_heads": 4, "mamba_head_dim": 10, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 3}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (SPACE_KEYS, 'num_groups=cfg.positive("n_groups")'),
        ({"mamba_n_heads": 4, "mamba_d_head": 10, "mamba_n_groups": 2}, 'num_heads=cfg.positive("mamba_n_heads")'),
        ({"ssm_state_size": 6}, "num_groups=2"),
        ({"n_groups": 5, "ssm_state_size": 6}, "num_groups=2"),
    ],
    ids=["keys", "other keys", "shapes and the width of a state", "a key that does not fit"],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_state_space_is_drafted_without_a_reference(
    tmp_path: Path, changes: dict[str, int], code: str, biased: bool
) -> None:
    layer = {**SPACE, **MLP, **NORMS} | ({"mixer.conv1d.bias": (64,)} if biased else {})
    made = drafted(tmp_path / "m", layer, layer, **changes, time_step_floor=1e-4, head_dim=None)
    assert made.arch is not None, made.why
    assert made.arch.layers[0].mixer == Mamba2(
        num_heads=4, head_dim=10, state_size=6, num_groups=2, conv_kernel_size=3, norm_eps=1e-5, conv_bias=biased
    )
    assert code in made.text
    assert 'cfg.ignore("time_step_floor")  # training only' in made.text
    assert made.text.count("# todo: ") == 0
    assert fits(made, tmp_path / "m")


def test_the_least_time_step_is_no_fact_of_training_alone(tmp_path: Path) -> None:
    layer = {**SPACE, **MLP, **NORMS}
    limits = {"time_step_min": 0.01, "time_step_limit": [0.0, float("inf")]}
    made = drafted(tmp_path / "m", layer, **SPACE_KEYS, **limits)
    assert made.arch is not None, made.why
    mixer = made.arch.layers[0].mixer
    assert isinstance(mixer, Mamba2)
    assert mixer.dt_min == 0.01
    assert any("a floor of the step" in guess for guess in made.guesses())
    assert 'cfg.expect("time_step_limit", [0.0, float("inf")])' in made.text
    bounded = drafted(tmp_path / "n", layer, **SPACE_KEYS, time_step_limit=[0.001, 0.1])
    assert bounded.unread == ("time_step_limit",)


def test_what_differs_from_a_state_space_is_a_noun_of_its_own(tmp_path: Path) -> None:
    bare = {name: shape for name, shape in SPACE.items() if "norm" not in name}
    made = drafted(tmp_path / "m", {**bare, **MLP, **NORMS}, **SPACE_KEYS)
    assert made.arch is not None, made.why
    assert isinstance(made.arch.layers[0].mixer, NewNoun)
    # what may be a field of it stays open
    assert set(SPACE_KEYS) <= set(made.unread)
    # rows of the input projection that no part of a state space accounts for
    wide = drafted(tmp_path / "n", {**SPACE, **MLP, **NORMS, "mixer.in_proj.weight": (150, HIDDEN)}, **SPACE_KEYS)
    assert wide.arch is not None, wide.why
    assert isinstance(wide.arch.layers[0].mixer, NewNoun)


def test_a_draft_declares_the_same_when_it_is_loaded_from_its_file(tmp_path: Path) -> None:
    made = drafted(tmp_path / "m")
    file = tmp_path / "newmodel.py"
    file.write_text(made.text)
    again = declare(str(tmp_path / "m"), port_file=file)
    assert again.arch == made.arch
    compile(made.text, str(file), "exec")


def test_no_tensor_in_a_layer_is_refused_with_what_there_is(tmp_path: Path) -> None:
    where = folder(tmp_path / "m", {"x.weight": (2, 2)}, prefix="blocks.")
    renamed = draft(locate(str(where)))
    assert renamed.arch is not None
    lonely = folder(tmp_path / "n", outside=OUTSIDE)
    (lonely / "model.safetensors").unlink()
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2, 2)}, lonely / "model.safetensors")
    with pytest.raises(FirstlightError, match="no tensor lies in a layer"):
        draft(locate(str(lonely)))
