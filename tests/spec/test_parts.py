"""Parts, labels and folded places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from reference_configs import TINY, tiny_config
from spec.variants import DELTA, GROUPED, UNIT, VARIANTS, one_layer, variant

from firstlight.spec.arch import ArchSpec
from firstlight.spec.cards import card_names
from firstlight.spec.mixers import MLAttention
from firstlight.spec.noun import NOTHING
from firstlight.spec.parts import OUTSIDE, fold_layers, parts, ranges, where
from firstlight.spec.shapes import part_weights

Declared = Callable[[dict[str, Any]], ArchSpec]


@pytest.mark.parametrize("name", TINY)
def test_parts_carry_every_operator_of_every_layer(name: str, declared: Declared) -> None:
    arch = declared(tiny_config(name))
    for place in range(len(arch.layers)):
        told = {op for part in parts(arch) if place in part.places for op in part.operators}
        # a residual part names the operators of the end of the model too
        assert told - set(arch.residual.head_operators) == set(arch.layer_operators(place))
    outside = {op for part in parts(arch) if OUTSIDE in part.places for op in part.operators}
    assert outside - set(arch.residual.operators) == set(arch.operators())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_noun_is_labelled_by_its_kind_its_gate_and_its_sizes(name: str) -> None:
    text, noun = VARIANTS[name]
    arch = variant(name)
    (found,) = (part for part in parts(arch) if part.noun is noun and part.kind in ("mixer", "feed-forward"))
    assert (found.label, found.layers) == (text, (0,))
    assert fold_layers(arch) == ((text, (0,)),)
    told = {op for part in parts(arch) if 0 in part.places for op in part.operators}
    assert told == set(arch.layer_operators(0))


def test_a_layer_of_one_sub_layer_has_one_norm_and_is_folded_alone() -> None:
    both, mixer, ffn = (one_layer(*nouns).layers[0] for nouns in ((GROUPED, UNIT), (GROUPED,), (NOTHING, UNIT)))
    arch = replace(one_layer(), layers=(both, mixer, ffn))
    assert fold_layers(arch) == (("GQA + MLP(50)", (0,)), ("GQA", (1,)), ("MLP(50)", (2,)))
    norms = next(part for part in parts(arch) if part.kind == "norm")
    names = [[weight.name for weight in part_weights(arch, norms, place)] for place in range(3)]
    assert names == [["mixer_norm.weight", "ffn_norm.weight"], ["mixer_norm.weight"], ["ffn_norm.weight"]]


def test_layouts_of_one_recurrence_are_told_apart() -> None:
    grouped = replace(DELTA, qkv_layout="qkvz_grouped")
    arch = replace(one_layer(), layers=tuple(one_layer(mixer).layers[0] for mixer in (DELTA, grouped)))
    labels = [part.label for part in parts(arch) if part.kind == "mixer"]
    assert labels == ["GDN [qkv_layout=separate]", "GDN [qkv_layout=qkvz_grouped]"]


@pytest.mark.parametrize("name", card_names())
def test_labels_are_unique_and_layers_fold_without_loss(name: str, card_arch: Callable[[str], ArchSpec]) -> None:
    arch = card_arch(name)
    labels = [part.label for part in parts(arch)]
    assert len(set(labels)) == len(labels)
    assert sorted(index for _, numbers in fold_layers(arch) for index in numbers) == list(range(len(arch.layers)))


def test_a_hybrid_folds_into_its_patterns(card_arch: Callable[[str], ArchSpec]) -> None:
    folded = [(pattern, ranges(numbers)) for pattern, numbers in fold_layers(card_arch("glm-5.3-flash"))]
    assert folded == [
        ("KDA + GLU(12288)", "0-2"),
        ("sparse MLA(top 2048) + MoE(288, top 8)", "3,7,11,15,19,23,27,31,35,39,43"),
        (
            "KDA + MoE(288, top 8)",
            "4-6,8-10,12-14,16-18,20-22,24-26,28-30,32-34,36-38,40-42,44",
        ),
    ]


def test_nouns_of_one_label_are_told_apart_by_what_differs(declared: Declared) -> None:
    arch = declared(tiny_config("deepseek_v3"))
    first = arch.layers[0]
    assert isinstance(first.mixer, MLAttention)
    wider = replace(first, mixer=replace(first.mixer, v_head_dim=24))
    labels = [part.label for part in parts(replace(arch, layers=(first, wider))) if part.kind == "mixer"]
    assert labels == ["MLA [v_head_dim=12]", "MLA [v_head_dim=24]"]


def test_layers_that_share_a_selection_are_a_part_of_their_own_without_an_index(declared: Declared) -> None:
    found = {part.label: part for part in parts(declared(tiny_config("glm_moe_dsa")))}
    assert found["sparse MLA(top 16)"].layers == (0, 1, 4)
    assert found["sparse MLA(top 16, shared)"].layers == (2, 3)
    assert found["index"].layers == (0, 1, 4)
    assert found["index"].operators == ("layer_norm", "index_topk")
    assert "index_topk" not in found["sparse MLA(top 16)"].operators


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((4,), "4"), ((1, 2), "1-2"), ((0, 1, 2, 4, 6, 7), "0-2,4,6-7"), ((3, 7), "3,7")]
)
def test_ranges_fold_runs(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ((OUTSIDE,), "outside the layers"),
        ((0, 1, 2), "all 3 layers"),
        ((0, 1, 2, OUTSIDE), "all 3 layers and outside the layers"),
        ((1,), "layer 1 (1 of 3)"),
        ((0, 2), "layers 0,2 (2 of 3)"),
    ],
)
def test_places_read_as_text(places: tuple[int, ...], text: str) -> None:
    assert where(places, 3) == text


def test_long_places_are_cut_but_counted() -> None:
    assert where(tuple(range(3, 45, 4)), 45) == "layers 3,7,11,15,... (11 of 45)"
