"""What does not fit is folded by pattern and told with its likely cause; a rule that is proposed works."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tiny_decoder import DECODER, EXPERTS, HIDDEN, INNER, Decoder, planned, stored
from torch import Tensor

from firstlight.spec.names import NameMap
from firstlight.weights.faults import LEFT_OVER, Fault, common, faults, renamings
from firstlight.weights.loadplan import Missing

Save = Callable[..., Path]
Tensors = dict[str, Tensor]


def found(folder: Path, names: NameMap = DECODER) -> tuple[Fault, ...]:
    plan, checkpoint = planned(folder, Decoder(), names)
    return faults(plan, checkpoint, names)


def renamed(changes: Mapping[str, str]) -> Tensors:
    """Return the tensors with parts of names replaced."""
    tensors = stored()
    for old, new in changes.items():
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    return tensors


def test_a_checkpoint_that_fits_has_none(save: Save) -> None:
    assert found(save(stored())) == ()


def test_experts_and_layers_fold_into_one_fault_per_pattern(save: Save) -> None:
    tensors = {name: t for name, t in stored().items() if "down_proj" not in name}
    (fault,) = found(save(tensors))
    assert (fault.kind, fault.name, fault.layers) == ("parameter", "layers.0.ffn.experts.0.down_proj.weight", (0, 1))
    assert fault.what == "no tensor fills layers.{n}.ffn.experts.{n}.down_proj.weight"
    assert fault.where == "layers 0-1"
    assert "looked for model.layers.0.mlp.experts.0.down_proj.weight" in fault.fix


def experts(prefix: str) -> dict[str, str]:
    """Return the rules of an expert's matrices, which have rules of their own in DECODER."""
    return {
        f"layers.{{i}}.ffn.experts.{{e}}.{end}_proj.weight": f"{prefix}.{end}_proj.weight"
        for end in ("gate", "up", "down")
    }


# what the checkpoint calls differently, and the rules that the faults propose for it
RENAMED = {
    "one projection": ({r"self_attn\.q_proj": "self_attn.query"},
                       {"layers.{i}.mixer.q_proj": "model.layers.{i}.self_attn.query"}),
    "a block": ({r"\.mlp\.": ".feed_forward."},
                {"layers.{i}.ffn.router": "model.layers.{i}.feed_forward.gate",
                 **experts("model.layers.{i}.feed_forward.experts.{e}")}),
    "the word for an expert": ({r"experts\.(\d+)": r"expert.\1"},
                               experts("model.layers.{i}.mlp.expert.{e}")),
    "a norm": ({"input_layernorm": "pre_norm"}, {"layers.{i}.mixer_norm": "model.layers.{i}.pre_norm"}),
    "outside of the layers": ({"embed_tokens": "tok_embeddings"}, {"embed": "model.tok_embeddings"}),
}  # fmt: skip


@pytest.mark.parametrize("what", RENAMED)
def test_the_rules_proposed_for_other_names_make_the_checkpoint_fit(what: str, save: Save) -> None:
    changes, rules = RENAMED[what]
    folder = save(renamed(changes))
    told = "; ".join(fault.fix for fault in found(folder))
    proposed = dict(re.findall(r'NAMES\.extend\(\{"(.+?)": "(.+?)"\}\)', told))
    assert proposed == rules
    assert found(folder, DECODER.extend(proposed)) == ()


def test_two_tensors_that_may_be_meant_are_not_guessed_between(save: Save) -> None:
    """gate_proj and up_proj of an expert have one shape: without names nothing tells them apart."""
    folder = save(renamed({"gate_proj": "w1", "up_proj": "w3"}))
    assert {fault.kind for fault in found(folder)} == {"parameter", "tensor"}
    assert not any("renamed" in fault.fix for fault in found(folder))


def test_a_tensor_of_another_shape_is_no_other_name(save: Save) -> None:
    tensors = renamed({r"self_attn\.q_proj": "self_attn.query"})
    tensors["model.layers.0.self_attn.query.weight"] = torch.ones(3, HIDDEN)
    tensors["model.layers.1.self_attn.query.weight"] = torch.ones(3, HIDDEN)
    assert not any("renamed" in fault.fix for fault in found(save(tensors)))


def test_sizes_of_one_do_not_matter_to_a_name() -> None:
    missing = {"layers.0.mixer.A_log": Missing(name="layers.0.mixer.A_log", spellings=("a.0.A_log",), shape=(4,))}
    assert renamings(missing, {"a.0.A_logs": (1, 1, 4, 1)}) == {"layers.{n}.mixer.A_log": "a.{n}.A_logs"}


# a tensor without a place, and what its name says
EXTRA = {
    "model.layers.1.self_attn.q_proj.bias": "a bias that the declaration leaves out: bias=True, or the like, in the "
    "noun that owns model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.other.bias": LEFT_OVER,
    "model.layers.1.mlp.gate.e_score_correction_bias": 'a selection bias: Router(bias="selection")',
    "model.layers.1.mlp.shared_expert.up_proj.weight": "a shared expert that the declaration leaves out: "
    "MoE(shared=SharedExpert(...))",
    "model.layers.1.mlp.shared_expert_gate.weight": 'a gate on the shared expert: SharedExpert(gate="sigmoid")',
    "model.layers.1.self_attn.k_norm.weight": "a norm of query and key heads: qk_norm=Norm(...)",
    "model.layers.1.self_attn.sinks": "learned sinks: sinks=True",
    "model.layers.1.self_attn.indexer.wk.weight": "an index that the declaration leaves out: indexer=Indexer(...)",
    "model.layers.1.self_attn.g_proj.weight": "a gate on the output: output_gate=OutputGate(...)",
    "model.mtp.0.proj.weight": "multi-token prediction, which is not run: NAMES.extend(ignore={...}) with that reason",
    "model.gadget.weight": LEFT_OVER,
}


@pytest.mark.parametrize("name", EXTRA)
def test_the_name_of_a_tensor_without_a_place_says_which_field_gives_it_one(name: str, save: Save) -> None:
    (fault,) = found(save(stored() | {name: torch.ones(5)}))
    assert (fault.kind, fault.name, fault.fix) == ("tensor", name, EXTRA[name])
    assert fault.what.endswith("[5] has no place")
    assert fault.layers == ((1,) if ".layers." in name else ())


def test_another_shape_is_told_with_both(save: Save) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    (fault,) = found(save(stored() | {name: torch.ones(HIDDEN, INNER + 1)}))
    assert (fault.kind, fault.name, fault.fix) == ("shape", name, "correct the size in the declaration")
    assert f"is [{HIDDEN}, {INNER + 1}], the declaration needs [{HIDDEN}, {INNER}]" in fault.what
    assert EXPERTS > 2


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("a.b.c", "a.b.c", (3, 0)),
        ("a.b.c", "a.x.c", (1, 1)),
        ("a.b", "a.b.c", (2, 0)),
        ("b.c", "a.b.c", (0, 2)),
        ("a", "b", (0, 0)),
    ],
)
def test_words_two_names_share(first: str, second: str, shared: tuple[int, int]) -> None:
    assert common(first, second) == common(second, first) == shared
