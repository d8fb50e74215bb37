"""Our parameter names and the spellings of checkpoints."""

from __future__ import annotations

import pytest

from firstlight.spec.names import DECODER, Candidate, NameMap, Source


def spelled(names: NameMap, ours: str) -> list[str]:
    return [candidate.name for candidate in names.candidates(ours)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
        ("head.weight", "lm_head.weight"),
        ("layers.3.mixer_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("layers.12.mixer.q_proj.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("layers.0.ffn.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.ffn.router.weight", "model.layers.0.mlp.gate.weight"),
        ("layers.0.ffn.router.bias", "model.layers.0.mlp.gate.e_score_correction_bias"),
        ("layers.0.ffn.shared.up_proj.weight", "model.layers.0.mlp.shared_experts.up_proj.weight"),
    ],
)
def test_decoder_names_are_those_of_most_checkpoints(ours: str, theirs: str) -> None:
    assert spelled(DECODER, ours) == [theirs]


def test_longest_rule_wins_whatever_the_order() -> None:
    rules = {"a.b": "long", "a": "short"}
    assert spelled(NameMap(rules=rules), "a.b.c") == ["long.c"]
    assert spelled(NameMap(rules=dict(reversed(rules.items()))), "a.b.c") == ["long.c"]


@pytest.mark.parametrize("ours", ["embedding.weight", "xembed.weight", "layers.x.mixer.weight", "layers.1"])
def test_rules_match_whole_segments_and_numbers_only(ours: str) -> None:
    assert DECODER.candidates(ours) == []


def test_expert_is_a_tensor_of_its_own_or_an_index_of_a_fused_one() -> None:
    fused = "model.layers.2.mlp.experts.gate_up_proj"
    source = Source(name="{body}layers.{i}.mlp.experts.gate_up_proj", expert=True, chunk=(1, 2))
    single = "model.layers.2.mlp.experts.17.up_proj.weight"
    first, second = DECODER.candidates("layers.2.ffn.experts.17.up_proj.weight")
    assert (first.name, first.expert) == (single, None)
    assert second == Candidate(name=fused, source=source, expert=17)


def test_prefixes_are_alternatives_in_order_for_templates_with_a_body() -> None:
    names = DECODER.extend({}, prefixes=("model.language_model.", "model."))
    assert spelled(names, "norm.weight") == ["model.language_model.norm.weight", "model.norm.weight"]
    assert spelled(names, "head.weight") == ["lm_head.weight"]


def test_alternatives_keep_the_order_of_preference() -> None:
    names = NameMap(rules={"w": ("{body}new", Source(name="old"))}, prefixes=("a.", "b."))
    assert spelled(names, "w.bias") == ["a.new.bias", "b.new.bias", "old.bias"]


def test_extension_replaces_and_adds_without_changing_the_original() -> None:
    names = DECODER.extend({"head": "output", "extra": "more"}, ignore={r"^mtp\.": "draft head"})
    assert spelled(names, "head.weight") == ["output.weight"]
    assert spelled(names, "extra.weight") == ["more.weight"]
    assert spelled(names, "norm.weight") == ["model.norm.weight"]
    assert names.ignored("mtp.x") == "draft head"
    assert names.ignored("model.layers.0.self_attn.rotary_emb.inv_freq") is not None
    assert spelled(DECODER, "head.weight") == ["lm_head.weight"] and DECODER.candidates("extra.weight") == []
    assert DECODER.ignored("mtp.x") is None


def test_tensor_that_no_pattern_matches_is_not_ignored() -> None:
    assert DECODER.ignored("model.layers.0.self_attn.rotary_emb.inv_freq_scale") is None


def test_a_rule_for_one_layer_wins_over_the_rule_for_all() -> None:
    names = DECODER.extend({"layers.2.mixer_norm": "{body}layers.2.odd_norm"})
    assert names.candidates("layers.2.mixer_norm.weight")[0].name == "model.layers.2.odd_norm.weight"
    assert names.candidates("layers.3.mixer_norm.weight")[0].name == "model.layers.3.input_layernorm.weight"
