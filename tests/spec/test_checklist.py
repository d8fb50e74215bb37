"""Reuse, modify, new: what a table of operators lacks for a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from reference_configs import tiny_config

from firstlight.ops.registry import Impl, OperatorTable, operator_table
from firstlight.spec.arch import ArchSpec, BlockAttnRes
from firstlight.spec.bind import BindContext
from firstlight.spec.cards import card_names
from firstlight.spec.checklist import Checklist, Item, checklist, missing_operators
from firstlight.spec.mixers import MLAttention

Declared = Callable[[dict[str, Any]], ArchSpec]
REF = Impl("ref", "nowhere:ref")


def everywhere(arch: ArchSpec, *, without: tuple[str, ...] = ()) -> OperatorTable:
    """Return a table with one fast body of every operator the model needs."""
    table = OperatorTable()
    for name in missing_operators(arch, OperatorTable()):
        if name not in without:
            table.register(name, "", REF, Impl("eager", "nowhere:eager", rank=10))
    return table


def with_body(table: OperatorTable, name: str, *bodies: Impl) -> OperatorTable:
    """Return a copy of the table in which an operator has only these bodies and the reference."""
    rest = {key: operator for key, operator in table.operators.items() if key != name}
    copy = OperatorTable(rest)
    copy.register(name, "", REF, *bodies)
    return copy


def item(found: Checklist, part: str) -> Item:
    """Return the item of a part."""
    return next(one for one in found.items if one.part == part)


@pytest.fixture
def kimi(declared: Declared) -> ArchSpec:
    """Return a tiny hybrid: KDA at 0, 1, 2, 4 and latent attention at 3."""
    return declared(tiny_config("kimi_linear"))


def test_everything_is_reused_where_every_operator_has_a_body(kimi: ArchSpec) -> None:
    found = checklist(kimi, everywhere(kimi))
    assert (found.count("reuse"), found.count("modify"), found.count("new")) == (len(found.items), 0, 0)
    assert item(found, "MLA").bodies == ("linear/eager", "rms_norm/eager", "cache_write/eager", "mla/eager")
    assert missing_operators(kimi, everywhere(kimi)) == ()


def test_an_absent_operator_makes_its_parts_new_and_is_named(kimi: ArchSpec) -> None:
    table = everywhere(kimi, without=("delta_rule", "short_conv"))
    found = checklist(kimi, table)
    kda = item(found, "KDA")
    assert (kda.status, kda.missing) == ("new", ("short_conv", "delta_rule"))
    assert kda.reason == "no operator short_conv; no operator delta_rule"
    assert kda.where == "layers 0-2,4 (4 of 5)"
    assert found.count("new") == 1
    assert missing_operators(kimi, table) == ("short_conv", "delta_rule")


def test_an_operator_with_only_its_reference_must_be_modified(kimi: ArchSpec) -> None:
    found = checklist(kimi, with_body(everywhere(kimi), "mla"))
    assert (item(found, "MLA").status, item(found, "MLA").reason) == ("modify", "mla: only the reference exists")
    assert found.count("modify") == 1


def test_a_shape_that_every_body_rejects_must_be_modified_and_the_reason_is_told(kimi: ArchSpec) -> None:
    def rejects(ctx: BindContext) -> str | None:
        return None if ctx.noun.v_head_dim % 8 == 0 else f"v_head_dim={ctx.noun.v_head_dim} is not a multiple of 8"

    table = with_body(everywhere(kimi), "mla", Impl("fused", "nowhere:fused", rejects=rejects))
    found = item(checklist(kimi, table), "MLA")
    assert found.status == "modify"
    assert "mla: fused in prefill: v_head_dim=12 is not a multiple of 8" in found.reason
    fitting = replace_mixers(kimi, v_head_dim=16)
    assert item(checklist(fitting, table), "MLA").status == "reuse"


def test_a_body_for_one_stage_alone_does_not_make_a_part_reusable(kimi: ArchSpec) -> None:
    decode_only = Impl(
        "absorbed", "nowhere:absorbed", rejects=lambda ctx: None if ctx.stage == "decode" else "decode only"
    )
    found = item(checklist(kimi, with_body(everywhere(kimi), "mla", decode_only)), "MLA")
    assert (found.status, found.reason) == ("modify", "mla: absorbed in prefill: decode only")
    both = with_body(everywhere(kimi), "mla", decode_only, Impl("eager", "nowhere:eager", rank=-1))
    assert item(checklist(kimi, both), "MLA").bodies[-2:] == ("mla/eager", "mla/absorbed")


def test_device_and_dtype_reach_the_bodies(kimi: ArchSpec) -> None:
    def rejects(ctx: BindContext) -> str | None:
        return None if (ctx.device, ctx.dtype) == ("cuda", "bfloat16") else f"not for {ctx.dtype} on {ctx.device}"

    table = with_body(everywhere(kimi), "mla", Impl("fused", "nowhere:fused", rejects=rejects))
    assert item(checklist(kimi, table, device="cuda", dtype="bfloat16"), "MLA").status == "reuse"
    assert "not for bfloat16 on cpu" in item(checklist(kimi, table), "MLA").reason


def test_missing_and_refused_operators_of_a_part_are_both_told(kimi: ArchSpec) -> None:
    table = with_body(everywhere(kimi, without=("delta_rule",)), "short_conv")
    found = item(checklist(kimi, table), "KDA")
    assert (found.status, found.reason) == ("new", "no operator delta_rule; short_conv: only the reference exists")


def test_shares_of_flops_add_up(kimi: ArchSpec) -> None:
    shares = [one.flops_share for one in checklist(kimi, everywhere(kimi)).items]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert max(shares) < 1.0


def test_a_new_residual_topology_is_one_new_part(declared: Declared) -> None:
    arch = declared(tiny_config("llama"))
    table = everywhere(arch)
    found = checklist(replace(arch, residual=BlockAttnRes(block_size=2)), table)
    assert [one.part for one in found.items if one.status == "new"] == ["block residual attention(2)"]
    assert found.count("reuse") == len(found.items) - 1


def test_an_index_is_judged_apart_from_the_attention_it_serves(declared: Declared) -> None:
    arch = declared(tiny_config("glm5_next"))
    found = checklist(arch, everywhere(arch, without=("index_pool",)))
    assert item(found, "index(pools of 4)").missing == ("index_pool",)
    assert item(found, "sparse MLA(top 16)").status == "reuse"


def test_a_checklist_prints_one_line_per_part_and_serialises(kimi: ArchSpec) -> None:
    found = checklist(kimi, everywhere(kimi, without=("delta_rule",)))
    lines = str(found).splitlines()
    assert lines[0] == f"kimi_linear on cpu, bfloat16: {len(found.items) - 1} reuse, 0 modify, 1 new"
    assert len(lines) == 1 + len(found.items)
    assert any(line.startswith("new") and "KDA" in line and "no operator delta_rule" in line for line in lines)
    assert json.loads(json.dumps(found.to_dict()))["items"][1]["missing"] == ["delta_rule"]


def test_changes_name_what_differs_between_two_checklists(kimi: ArchSpec, declared: Declared) -> None:
    before = checklist(kimi, everywhere(kimi, without=("delta_rule",)))
    after = checklist(kimi, everywhere(kimi))
    assert before.changes(before) == ()
    (line,) = before.changes(after)
    assert line.startswith("~ KDA: new -> reuse, layers 0-2,4 (4 of 5)")
    other = checklist(declared(tiny_config("llama")), everywhere(kimi))
    assert {"- KDA: reuse", "- MLA: reuse"} <= set(after.changes(other))
    assert any(text.startswith("+ GQA: new") for text in after.changes(other))


@pytest.mark.parametrize("name", card_names())
def test_the_package_has_every_operator_of_every_card(name: str, card_arch: Callable[[str], ArchSpec]) -> None:
    table = operator_table()
    assert missing_operators(card_arch(name), table) == ()
    assert checklist(card_arch(name), table).count("new") == 0


def replace_mixers(arch: ArchSpec, **changes: Any) -> ArchSpec:
    """Return the model with its latent attention changed."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **changes)) if isinstance(layer.mixer, MLAttention) else layer
        for layer in arch.layers
    )
    return replace(arch, layers=layers)
