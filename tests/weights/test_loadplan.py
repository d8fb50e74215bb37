"""What does not fit is found from headers alone and named as the checkpoint names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_decoder import EXPERTS, HIDDEN, INNER, VOCAB, Decoder, Matrix, fuse_experts, planned, stored

from firstlight.errors import FirstlightError
from firstlight.spec.names import DECODER
from firstlight.weights.loadplan import Missing


def test_missing_tensor_is_named_in_the_spelling_of_the_checkpoint_with_the_nearest(save: Callable[..., Path]) -> None:
    tensors = stored()
    tensors["model.layers.1.self_attn.q_projection.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    # closer in spelling, but of another layer
    tensors["model.layers.0.self_attn.q_proj.weights"] = torch.ones(1)
    plan, _ = planned(save(tensors), Decoder())
    assert [missing.name for missing in plan.missing] == ["layers.1.mixer.q_proj.weight"]
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert caught.value.where == "here"
    assert (
        "missing: model.layers.1.self_attn.q_proj.weight (nearest: model.layers.1.self_attn.q_projection.weight)"
        in caught.value.why
    )


def test_parameter_without_a_rule_is_missing_under_our_name(save: Callable[..., Path]) -> None:
    model = Decoder()
    model.gadget = Matrix((3,))
    plan, _ = planned(save(stored()), model)
    assert plan.missing == (Missing(name="gadget.weight", spellings=(), shape=(3,)),)
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert "gadget.weight (the name map has no rule for it)" in caught.value.why


def test_unexpected_tensors_are_listed_up_to_a_cap_and_counted(save: Callable[..., Path]) -> None:
    extra = {f"model.extra.{i}": torch.ones(1) for i in range(11)}
    plan, _ = planned(save(stored() | extra), Decoder())
    assert sorted(plan.unexpected) == sorted(extra)
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert caught.value.what.endswith("11 unexpected")
    assert caught.value.why.count("model.extra.") == 8 and "unexpected: 3 more" in caught.value.why


def test_ignored_tensors_are_skipped_with_the_reason(save: Callable[..., Path]) -> None:
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plan, _ = planned(save(stored() | {table: torch.ones(2, dtype=torch.float64)}), Decoder())
    plan.raise_if_bad("here")
    assert plan.skipped == {table: DECODER.ignored(table)}


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.norm.weight", (HIDDEN + 1,), (HIDDEN,)),
        ("model.layers.0.self_attn.k_proj.weight", (8, HIDDEN), (4, HIDDEN)),
        ("model.layers.0.self_attn.conv.weight", (4, 1, HIDDEN), (HIDDEN, 4)),
        ("lm_head.weight", (HIDDEN, VOCAB), (VOCAB, HIDDEN)),
    ],
)
def test_other_shape_is_named_with_both_shapes(
    save: Callable[..., Path], name: str, shape: tuple[int, ...], needed: tuple[int, ...]
) -> None:
    plan, _ = planned(save(stored() | {name: torch.ones(shape)}), Decoder())
    assert [(m.name, m.expected, m.found) for m in plan.mismatched] == [(name, needed, shape)]
    assert plan.unexpected == ()
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert f"{name} is {list(shape)}, the model needs {list(needed)}" in caught.value.why


@pytest.mark.parametrize("experts", [EXPERTS + 1, EXPERTS - 1])
def test_fused_tensor_with_another_number_of_experts_does_not_fit(save: Callable[..., Path], experts: int) -> None:
    tensors = fuse_experts(stored())
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = torch.ones(experts, HIDDEN, INNER)
    plan, _ = planned(save(tensors), Decoder())
    assert {mismatch.name for mismatch in plan.mismatched} == {name}
    with pytest.raises(FirstlightError, match="other shape"):
        plan.raise_if_bad("here")


def test_untied_model_without_a_head_hints_at_tying(save: Callable[..., Path]) -> None:
    tensors = stored()
    del tensors["lm_head.weight"]
    plan, _ = planned(save(tensors), Decoder())
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert "missing: lm_head.weight" in caught.value.why and "tie_word_embeddings" in caught.value.fix


def test_other_missing_tensors_do_not_hint_at_tying(save: Callable[..., Path]) -> None:
    tensors = stored()
    del tensors["model.norm.weight"]
    plan, _ = planned(save(tensors), Decoder())
    with pytest.raises(FirstlightError) as caught:
        plan.raise_if_bad("here")
    assert "tie_word_embeddings" not in caught.value.fix


def test_sources_end_at_the_boundary_of_a_name(save: Callable[..., Path]) -> None:
    plan, _ = planned(save(stored(layers=11)), Decoder(layers=11))
    first = plan.sources("layers.1")
    assert first and all(name.startswith("model.layers.1.") for name in first)
    assert plan.sources("layers.1.mixer") == {
        f"model.layers.1.self_attn.{rest}"
        for rest in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "conv.weight", "A_log")
    }
    assert plan.sources("layers.1.mixer.q_proj") == {"model.layers.1.self_attn.q_proj.weight"}
    assert len(plan.sources("layers.1.mixer.qkv")) == 3
    assert plan.sources("head") == {"lm_head.weight"}
    assert plan.sources("") == set(stored(layers=11))
    assert plan.sources("lay") == set()
