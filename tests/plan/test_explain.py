"""A Plan made readable."""

from __future__ import annotations

from dataclasses import replace

from firstlight.engine.assemble import Declared, declare
from firstlight.ops.registry import Impl, OperatorTable
from firstlight.plan.explain import body_verdicts, fold, memory
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.bind import BindContext

CARD = "kimi-linear-48b-a3b"


def declared() -> Declared:
    """Return a hybrid of 27 layers of three kinds, without weights."""
    return declare(CARD)


def test_folded_rows_hold_every_binding_once() -> None:
    plan, arch = declared().plan(), declared().arch
    rows = fold(plan, arch)
    unfolded = {
        (layer, stage, op.op): op.impl
        for row in rows
        for layer in (row.layers or (None,))
        for stage in row.stages
        for op in row.ops
    }
    assert unfolded == {(b.layer, b.stage, b.op): b.impl for b in plan.bindings}
    assert sum(len(row.ops) * len(row.stages) * len(row.layers or (None,)) for row in rows) == len(plan.bindings)


def test_equal_layers_fold_and_stages_fold_where_they_agree() -> None:
    rows = fold(declared().plan(), declared().arch)
    assert [(row.place, len(row.stages)) for row in rows] == [
        ("-", 2),
        ("0", 2),
        ("1-2,4-6,8-10,12-14,16-18,20-22,24-25", 2),
        ("3,7,11,15,19,23,26", 1),
        ("3,7,11,15,19,23,26", 1),
    ]


def test_a_layer_with_another_body_gets_its_own_row() -> None:
    model = declared()
    rows = fold(model.planner().bind(5, None, "delta_rule", "ref").build(), model.arch)
    alone = [row for row in rows if row.layers == (5,)]
    assert [op.impl for op in alone[0].ops if op.op == "delta_rule"] == ["ref"]
    assert len(alone) == 1


def test_memory_follows_formats_and_context() -> None:
    model = declared()
    wide = memory(model.planner().build(precision=PrecisionPolicy(backbone="float32")), model.arch, context=1000)
    narrow = memory(model.plan(), model.arch, context=1000)
    # 7 MLA layers, 576 values of 2 bytes
    assert narrow.cache_bytes_per_token == 7 * 576 * 2
    assert narrow.sequence_bytes == 1000 * 7 * 576 * 2 + narrow.state_bytes_per_sequence
    assert wide.cache_bytes_per_token == 2 * narrow.cache_bytes_per_token
    assert wide.weight_bytes > 1.9 * narrow.weight_bytes
    assert memory(model.plan(), model.arch).context == model.arch.max_position_embeddings


def test_bodies_say_where_they_cannot_run() -> None:
    def never(ctx: BindContext) -> str:
        return f"needs a device, not {ctx.device}"

    def asks_noun(ctx: BindContext) -> str | None:
        return None if ctx.noun.head_dim else "no"

    table = OperatorTable()
    table.register(
        "twice",
        "x + x",
        Impl("ref", "math:sqrt"),
        Impl("absent", "no_such_room:twice", rank=3),
        Impl("never", "math:sqrt", never, rank=2),
        Impl("picky", "math:sqrt", asks_noun, rank=1),
    )
    found = {verdict.impl: verdict for verdict in body_verdicts(table)}
    assert list(found) == ["absent", "never", "picky", "ref"]
    assert [verdict.usable for verdict in found.values()] == [False, False, False, True]
    assert "not installed" in found["absent"].refusals["decode"]
    assert found["never"].refusals["prefill"] == "needs a device, not cpu"
    assert "depends on the model" in found["picky"].refusals["prefill"]


def test_reasons_are_part_of_what_is_folded() -> None:
    model = declared()
    plan = model.plan()
    changed = tuple(replace(b, reason="because") if b.layer == 4 else b for b in plan.bindings)
    assert any(row.layers == (4,) for row in fold(replace(plan, bindings=changed), model.arch))
