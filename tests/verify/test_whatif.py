"""The words and numbers that are tried for a declaration; what is told fits, and what fits is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spec.variants import DELTA, GROUPED, HIDDEN, INDEXED, NORM
from verify.planted import run, write_port

from firstlight.layers.decoder import DecoderLayer
from firstlight.spec.arch import Layer, PreNorm
from firstlight.spec.feedforward import GLU, Router
from firstlight.spec.mixers import Decay
from firstlight.verify.whatif import numbers_of, otherwise, rebuilt

Tiny = Callable[[str], Path]
LAYER = Layer(mixer=GROUPED, ffn=GLU(intermediate_size=32), norm=NORM)


def facts(noun: Any, numbers: dict[str, float] | None = None) -> dict[str, list[Any]]:
    """Return path -> what is tried there, in order."""
    found: dict[str, list[Any]] = {}
    for fact in otherwise(noun, "n", numbers):
        found.setdefault(fact.path, []).append(fact.after)
    return found


def test_every_word_and_flag_of_a_noun_and_of_those_inside_is_tried() -> None:
    tried = facts(GROUPED)
    assert tried["n.rope.layout"] == ["interleave"]
    assert tried["n.qk_norm.kind"] == ["rms", "layer"]
    # what may be left out is, too
    assert tried["n.rope"] == tried["n.qk_norm"] == [None]
    assert tried["n.bias"] == [True]
    assert "n.num_attention_heads" not in tried
    assert facts(INDEXED)["n.indexer.key_norm.kind"] == ["rms", "rms1p"]


def test_numbers_are_those_of_the_config_the_best_spelt_first() -> None:
    numbers = {"rms_norm_eps": 3e-6, "routed_scaling_factor": 2.5, "num_experts": 8}
    router = facts(Router(score="sigmoid", scale=1.5), numbers)
    # the usual ones, then those of the config
    assert router["n.scale"] == [1.0, 2.5, 3e-6, 8]
    # an int field takes no fraction
    assert router["n.num_groups"] == [8]
    assert facts(NORM, numbers)["n.eps"] == [1e-5, 1e-8, 1e-12, 8, 3e-6, 2.5]


def test_the_key_of_a_number_is_told() -> None:
    told = [str(fact) for fact in otherwise(Router(score="sigmoid", scale=1.0), "r", {"routed_scaling_factor": 2.5})]
    assert "r.scale = 2.5, routed_scaling_factor of config.json (the port says 1.0)" in told


def test_a_word_that_needs_a_number_beside_it_gets_the_usual_one() -> None:
    softplus = Decay(granularity="channel", form="softplus")
    (fact,) = (f for f in otherwise(softplus, "d", None) if f.after == "bounded")
    assert (fact.changed.form, fact.changed.lower_bound) == ("bounded", -5.0)
    back = [f.changed for f in otherwise(fact.changed, "d", None) if f.after == "softplus"]
    assert [(one.form, one.lower_bound) for one in back] == [("softplus", None)]


def test_numbers_of_nested_tables_have_dotted_keys() -> None:
    raw = {"a": 1, "b": {"c": 2.5, "flag": True}, "list": [3], "word": "4"}
    assert dict(numbers_of(raw)) == {"a": 1, "b.c": 2.5}


def test_a_layer_is_rebuilt_over_the_same_weights_or_not_at_all() -> None:
    layer = DecoderLayer(HIDDEN, LAYER, PreNorm())
    turned = replace(GROUPED, rope=replace(GROUPED.rope, layout="interleave"))
    other = rebuilt(layer, HIDDEN, replace(LAYER, mixer=turned), PreNorm())
    assert other is not None
    assert dict(other.named_parameters()).keys() == dict(layer.named_parameters()).keys()
    assert all(mine is theirs for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True))
    # another set of weights, other sizes, other mixers
    for mixer in (replace(GROUPED, bias=True), replace(GROUPED, head_dim=8), DELTA):
        assert rebuilt(layer, HIDDEN, replace(LAYER, mixer=mixer), PreNorm()) is None
    assert next(layer.parameters()).dtype == torch.get_default_dtype()


def test_a_number_of_the_config_explains_a_module(tiny: Tiny, tmp_path: Path) -> None:
    """A base of the rotation that is in no table of usual ones."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "turned")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", {}) or {}
    config |= {"rope_parameters": {**rope, "rope_theta": 31337.0, "rope_type": "default"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert run(folder).passed
    port = write_port(tmp_path, "llama", "GQAttention", "rope=replace(n.rope, theta=8192.0)")
    first = run(folder, port).first_divergence
    assert first is not None
    assert first.hint.startswith("equal with mixer.rope.theta = 31337.0, rope_parameters.rope_theta of config.json")


def test_two_wrong_facts_are_not_explained_by_one(tiny: Tiny, tmp_path: Path) -> None:
    change = "rope=replace(n.rope, layout='interleave', theta=123.0)"
    first = run(tiny("llama"), write_port(tmp_path, "llama", "GQAttention", change)).first_divergence
    assert first is not None
    assert first.place == "layers.0.mixer"
    assert "equal with" not in first.hint


@pytest.mark.parametrize("name", ["llama", "kimi_linear", "nemotron_h"])
def test_no_fact_is_offered_where_all_agrees(name: str, tiny: Tiny) -> None:
    report = run(tiny(name))
    assert report.passed
    assert not any(check.hint for check in report.checks)
