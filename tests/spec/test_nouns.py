"""Nouns refuse what no layer could run, and name the operators that they call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from spec.variants import DELTA, EXPERTS, FROM_Q, GROUPED, LATENT, LOW_RANK, SPACE, UNGATED, UNIT

from firstlight.spec import arch, caches, feedforward, mixers, norm
from firstlight.spec.caches import CacheDtypes
from firstlight.spec.feedforward import Act, Latent, Router, SharedExpert
from firstlight.spec.mixers import Decay, OutputGate
from firstlight.spec.norm import Norm, Rope

# a cast: what a port file writes is checked by nobody but the noun
Made = Callable[..., Any]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: OutputGate(act="sigmoid", source="q_proj", rank=4), "no low-rank projection, got rank=4"),
        (lambda: replace(LATENT, output_gate=FROM_Q), "gate of MLAttention reads the hidden state, not q_proj"),
        (lambda: replace(DELTA, output_gate=FROM_Q), "gate of DeltaRule reads the hidden state, not q_proj"),
        (lambda: replace(DELTA, qkv_layout="qkvz_grouped", output_gate=LOW_RANK), "qkvz_grouped holds"),
        (
            lambda: replace(DELTA, qkv_layout="qkvz_grouped", decay=Decay(granularity="head", form="softplus", rank=4)),
            "qkvz_grouped holds",
        ),
        (
            lambda: replace(DELTA, qkv_layout="qkvz_grouped", decay=Decay(granularity="channel", form="softplus")),
            "qkvz_grouped holds",
        ),
        (lambda: replace(DELTA, num_v_heads=5), "num_v_heads=5 is not a multiple of num_k_heads=2"),
        (lambda: replace(SPACE, num_groups=4), "num_heads=6 is not a multiple of num_groups=4"),
        (lambda: replace(SPACE, dt_min=-0.1), "a time step is never negative, got dt_min=-0.1"),
        (lambda: replace(GROUPED, num_key_value_heads=4), "num_attention_heads=6 is not a multiple of num_key_value"),
        (lambda: replace(GROUPED, rope=Rope(theta=1e4, dim=18)), "rope turns 18 dimensions of GQAttention.head_dim=16"),
        (lambda: replace(LATENT, rope=Rope(theta=1e4, dim=8)), "8 dimensions of MLAttention.qk_rope_head_dim=4"),
        (lambda: replace(LATENT, bias=True, q_lora_rank=None), "a query of full rank has none"),
        (lambda: Act(kind="clamp"), "clamp alone has a limit, and needs one"),
        (lambda: Act(kind="gelu_tanh", limit=7.0), "clamp alone has a limit"),
        (lambda: Decay(granularity="head", form="bounded"), "bounded decay alone has a bound, and needs one"),
        (lambda: Decay(granularity="head", form="softplus", lower_bound=-5.0), "bounded decay alone has a bound"),
    ],
)
def test_a_combination_that_no_layer_runs_is_refused(make: Made, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize(
    ("make", "field", "word"),
    [
        (lambda word: Act(kind=word), "Act.kind", "gelu"),
        (lambda word: OutputGate(act=word), "OutputGate.act", "tanh"),
        (lambda word: OutputGate(act="silu", source=word), "OutputGate.source", "k_proj"),
        (lambda word: SharedExpert(intermediate_size=8, gate=word), "SharedExpert.gate", "silu"),
        (lambda word: replace(DELTA, qkv_layout=word), "DeltaRule.qkv_layout", "zqkv"),
        (lambda word: Decay(granularity=word, form="softplus"), "Decay.granularity", "token"),
        (lambda word: Router(score=word), "Router.score", "sqrtsoftplus"),
        (lambda word: Router(score="softmax", bias=word), "Router.bias", "logit"),
    ],
)
def test_a_word_that_the_vocabulary_lacks_is_refused_with_those_it_has(make: Made, field: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be '.*' or '.*', got '{word}'$"):
        make(word)


def literals() -> list[tuple[type, str]]:
    """Return (class, field) for every field of words in the vocabulary."""
    found = {
        cls: get_type_hints(cls)
        for module in (arch, caches, feedforward, mixers, norm)
        for cls in vars(module).values()
        if isinstance(cls, type) and is_dataclass(cls) and cls.__module__ == module.__name__
    }
    return [(cls, name) for cls, hints in found.items() for name, hint in hints.items() if get_origin(hint) is Literal]


@pytest.mark.parametrize(("cls", "field"), literals())
def test_no_noun_takes_a_word_that_its_type_does_not_list(cls: Any, field: str) -> None:
    noun = cls.__new__(cls)
    for name, hint in get_type_hints(cls).items():
        if get_origin(hint) is Literal:
            object.__setattr__(noun, name, "nonsense" if name == field else get_args(hint)[0])
    with pytest.raises(ValueError, match=f"^{cls.__name__}.{field} must be .*, got 'nonsense'$"):
        noun.__post_init__()


def test_a_state_space_keeps_its_state_and_the_window_of_its_convolution() -> None:
    decl = SPACE.declare(CacheDtypes(kv="bfloat16", state="float32"))
    assert (SPACE.value_dim, SPACE.conv_dim) == (60, 60 + 2 * 2 * 8)
    assert decl.pages == ()
    assert [(s.name, s.kind, s.shape, s.dtype) for s in decl.states] == [
        ("recurrent", "recurrent", (6, 10, 8), "float32"),
        ("conv", "window", (3, 92), "bfloat16"),
    ]
    assert [(r.name, r.shape, r.dtype) for r in decl.records] == [
        ("conv_input", (92,), "bfloat16"),
        ("dt", (6,), "float32"),
    ]
    assert (decl.bytes_per_sequence, decl.bytes_per_token, decl.grid) == (4 * 480 + 2 * 276, 0, 64)


@pytest.mark.parametrize(
    ("noun", "names"),
    [
        (GROUPED, "linear cache_write attention rms_norm rope"),
        (replace(GROUPED, output_gate=FROM_Q), "linear cache_write attention rms_norm rope output_gate"),
        (replace(GROUPED, qk_norm=Norm(kind="layer", eps=1e-6), rope=None), "linear cache_write attention layer_norm"),
        (replace(LATENT, output_gate=LOW_RANK), "linear rms_norm cache_write mla output_gate"),
        (replace(DELTA, qkv_layout="qkvz_grouped"), "linear short_conv decay_gate delta_rule gated_rms_norm"),
        (SPACE, "linear short_conv mamba2 gated_rms_norm"),
        (UNIT, "linear activation"),
        (replace(UNIT, act=Act(kind="gelu_tanh")), "linear glu"),
        (EXPERTS, "router experts linear glu shared_gate"),
        (UNGATED, "router experts linear activation"),
        (replace(UNGATED, shared=None), "router experts"),
        (replace(UNGATED, shared=None, latent=Latent(size=8)), "router experts linear"),
        (replace(UNGATED, shared=None, latent=Latent(size=8, norm=True)), "router experts linear rms_norm"),
        (replace(UNGATED, shared=SharedExpert(intermediate_size=8, act=Act())), "router experts linear glu"),
    ],
)
def test_a_noun_names_the_operators_that_it_calls(noun: Any, names: str) -> None:
    assert noun.operators() == tuple(names.split())
