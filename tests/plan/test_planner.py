"""The Plan: every binding has a reason, nothing unavailable is accepted in silence, and the runner obeys it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firstlight.engine.assemble import Declared, build_runner, declare
from firstlight.errors import EXIT_MISSING_OPERATORS, FirstlightError
from firstlight.memory.sequence import SequenceCache
from firstlight.ops.registry import Impl, OperatorTable
from firstlight.plan.planner import Plan, Planner
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.arch import ArchSpec, BlockAttnRes
from firstlight.spec.bind import BindContext

Tiny = Callable[[str], Path]
FP32 = PrecisionPolicy(backbone="float32")


@pytest.fixture
def declared(tiny: Tiny) -> Declared:
    """Return the hybrid fixture taken apart."""
    return declare(str(tiny("glm5_next")))


def test_every_operator_of_every_layer_and_stage_is_bound_with_a_reason(declared: Declared) -> None:
    plan = declared.plan(FP32)
    for index in range(len(declared.arch.layers)):
        for stage in ("prefill", "decode"):
            for op in declared.arch.layer_operators(index):
                assert plan.impl(index, stage, op)
    assert all(binding.reason for binding in plan.bindings)
    assert all(rejected.reason for binding in plan.bindings for rejected in binding.rejected)


def test_every_body_is_either_chosen_or_rejected(declared: Declared, table: OperatorTable) -> None:
    for binding in declared.plan(FP32).bindings:
        names = {binding.impl, *(rejected.impl for rejected in binding.rejected)}
        assert names == {impl.name for impl in table[binding.op].impls}


def test_layers_call_exactly_the_operators_that_their_nouns_declare(tiny: Tiny) -> None:
    for name in ("llama", "qwen3_moe", "deepseek_v3", "glm_moe_dsa", "kimi_linear", "glm5_next"):
        found = declare(str(tiny(name)))
        runner, _ = build_runner(found, found.plan(FP32), num_tokens=64)
        called: dict[int | None, set[str]] = {}
        for (_, layer), ops in runner.bound.ops.items():
            for op, body in ops.bodies.items():
                ops.bodies[op] = recording(called.setdefault(layer, set()), op, body)
        sequence = SequenceCache(runner.pool.blocks)
        runner.run(sequence, list(range(3, 30)))
        runner.run(sequence, [5])
        for index in range(len(found.arch.layers)):
            assert called[index] == set(found.arch.layer_operators(index)), (name, index)
        assert called[None] == set(found.arch.operators())


def recording(called: set[str], op: str, body: Callable[..., object]) -> Callable[..., object]:
    """Return the body, noting that it was called."""

    def run(*args: object, **kwargs: object) -> object:
        called.add(op)
        return body(*args, **kwargs)

    return run


def test_override_binds_one_layer_and_stage(declared: Declared) -> None:
    plan = declared.planner().bind(2, "decode", "delta_rule", "ref").build(precision=FP32)
    assert plan.impl(2, "decode", "delta_rule") == "ref"
    assert plan.impl(2, "prefill", "delta_rule") != "ref"
    assert plan.impl(1, "decode", "delta_rule") != "ref"


def test_later_override_wins(declared: Declared) -> None:
    planner = declared.planner().bind(None, None, "delta_rule", "ref").bind(0, None, "delta_rule", "eager")
    plan = planner.build(precision=FP32)
    assert [plan.impl(i, "prefill", "delta_rule") for i in (0, 1)] == ["eager", "ref"]


@pytest.mark.parametrize(
    ("layer", "stage", "op", "impl", "culprit"),
    [
        (None, None, "delta_rul", "ref", "delta_rule"),
        (None, None, "delta_rule", "fused_", "it has: eager, ref"),
        (99, None, "delta_rule", "ref", "layers 0 to 7"),
        (None, "verify", "delta_rule", "ref", "prefill and decode"),
        (None, None, "attention", "ref", "not used"),
    ],
)
def test_wrong_override_is_refused_with_its_choices(
    declared: Declared, layer: int | None, stage: str | None, op: str, impl: str, culprit: str
) -> None:
    with pytest.raises(FirstlightError) as caught:
        declared.planner().bind(layer, stage, op, impl)
    assert culprit in str(caught.value)


def test_body_that_rejects_its_place_is_refused_when_asked_for(declared: Declared) -> None:
    def never(ctx: BindContext) -> str | None:
        return "wrong phase of the moon"

    declared.table.register("delta_rule", "", Impl("lunar", "nowhere:nothing", rejects=never, rank=99))
    assert declared.plan(FP32).impl(0, "prefill", "delta_rule") != "lunar"
    with pytest.raises(FirstlightError, match="lunar"):
        declared.planner().bind(None, None, "delta_rule", "lunar").build(precision=FP32)


def test_axis_without_a_size_is_recorded_as_refused(declared: Declared) -> None:
    plan = declared.planner().build(parallel="TP+EP+PP", graph_mode=True)
    assert {refusal.what for refusal in plan.refused} == {"TP", "EP", "PP", "graph_mode"}
    assert all(refusal.reason for refusal in plan.refused)
    assert set(plan.parallel.values()) == {1}
    assert plan.graph_mode is False


@pytest.mark.parametrize(("text", "culprit"), [("TP=2", "2 devices"), ("XP", "TP, EP"), ("TP=0", "TP=1")])
def test_size_that_cannot_run_is_an_error(declared: Declared, text: str, culprit: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        declared.planner().build(parallel=text)
    assert culprit in str(caught.value)


def test_missing_operator_ends_with_exit_code_3(declared: Declared, table: OperatorTable) -> None:
    arch: ArchSpec = replace(declared.arch, residual=BlockAttnRes(block_size=4))
    with pytest.raises(FirstlightError) as caught:
        Planner(arch, table).build()
    assert caught.value.exit_code == EXIT_MISSING_OPERATORS
    assert "attn_res" in caught.value.why


def test_plan_survives_json(declared: Declared) -> None:
    plan = declared.planner().bind(1, "prefill", "router", "ref").build(parallel="TP", precision=FP32)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_editing_the_json_of_a_plan_changes_the_body_used(declared: Declared) -> None:
    declared.table.register("delta_rule", "", Impl("zero", f"{__name__}:zeros", rank=-1))
    data = json.loads(json.dumps(declared.plan(FP32).to_dict()))
    for binding in data["bindings"]:
        if binding["op"] == "delta_rule" and binding["layer"] == 0:
            binding["impl"] = "zero"
    used: list[str] = []
    original = Impl.load

    def load(self: Impl) -> Callable[..., object]:
        used.append(self.name)
        return zeros if self.name == "zero" else original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Impl, "load", load)
        edited, _ = build_runner(declared, Plan.from_dict(data), num_tokens=64)
        plain, _ = build_runner(declared, declared.plan(FP32), num_tokens=64)
    assert "zero" in used
    found = [runner.run(SequenceCache(runner.pool.blocks), [3, 4, 5]) for runner in (edited, plain)]
    assert not torch.equal(*found)


def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
    """Stand in for a delta rule that puts out nothing."""
    return torch.zeros_like(v)


@pytest.mark.parametrize("data", [{}, {"bindings": [{"layer": 0}]}, {"bindings": []}])
def test_what_is_not_a_plan_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(FirstlightError, match="not a plan"):
        Plan.from_dict(data)


def test_plan_of_another_model_is_refused(declared: Declared, tiny: Tiny) -> None:
    other = declare(str(tiny("llama"))).plan(FP32)
    with pytest.raises(FirstlightError, match="llama"):
        build_runner(declared, other, num_tokens=64)


@pytest.mark.parametrize(
    ("field", "value", "culprit"),
    [
        ("kv_cache", "fp8", "FP8 in tiles of 128 is not available yet"),
        ("index", "mxfp8", "MXFP8"),
        ("backbone", "int4", "bfloat16"),
    ],
)
def test_format_that_is_not_available_is_refused_by_name(field: str, value: str, culprit: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        PrecisionPolicy(**{field: value})
    assert culprit in str(caught.value)
