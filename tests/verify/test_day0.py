"""day0: the report's evidence follows from the plan and the proof, never from fixed text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from firstlight.cli.output import json_text
from firstlight.engine.assemble import Declared, declare
from firstlight.errors import FirstlightError
from firstlight.ops.registry import Impl
from firstlight.plan.planner import Plan
from firstlight.verify.day0 import Day0Options, Day0Report, run_day0
from firstlight.verify.steps import Finding, Step

Tiny = Callable[[str], Path]
QUICK = Day0Options(reference="ref", num_tokens=6, max_tokens=2)
STEPS = ["decompose", "reuse", "fuse", "quantise", "parallelise", "balance", "DSL, graph, cache", "prove"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep tiny matrices on one thread."""
    torch.set_num_threads(1)


def reported(declared: Declared, plan: Plan | None = None, options: Day0Options = QUICK) -> Day0Report:
    """Return the report of a model."""
    return run_day0(declared, plan or declared.plan(), options)


def statuses(report: Day0Report) -> dict[str, str]:
    """Return step -> status."""
    return {step.name: step.status for step in report.steps}


def finding(report: Day0Report, step: str, topic: str) -> Finding:
    """Return the only finding of a topic."""
    found = [f for s in report.steps if s.name == step for f in s.findings if f.topic == topic]
    assert len(found) == 1
    return found[0]


def test_report_opens_with_the_eight_steps_in_order(tiny: Tiny) -> None:
    report = reported(declare(str(tiny("llama"))), options=replace(QUICK, reference="transformers"))
    assert [step.name for step in report.steps] == STEPS
    assert report.passed
    assert statuses(report)["prove"] == "done"


def test_own_reference_leaves_the_port_unproven(tiny: Tiny) -> None:
    report = reported(declare(str(tiny("llama"))))
    assert report.passed
    assert statuses(report)["prove"] == "not yet"
    assert "not proven" in finding(report, "prove", "equal to the reference").evidence


def test_report_is_json_and_says_everything_twice_over(tiny: Tiny) -> None:
    report = reported(declare(str(tiny("llama"))))
    data = json.loads(json_text(report.to_dict()))
    assert data["passed"] is True
    assert [step["status"] for step in data["steps"]] == [step.status for step in report.steps]
    assert data["plan"] == json.loads(json_text(report.plan.to_dict()))
    assert data["proof"]["passed"] is True
    assert len(data["written"]["ids"]) == 2


def test_steps_follow_what_the_model_has(tiny: Tiny) -> None:
    dense, hybrid = reported(declare(str(tiny("llama")))), reported(declare(str(tiny("glm5_next"))))
    assert finding(dense, "parallelise", "EP").status == "not applicable"
    assert finding(hybrid, "parallelise", "EP").status == "not yet"
    assert finding(dense, "quantise", "index path").status == "not applicable"
    assert finding(hybrid, "quantise", "index path").status == "not yet"
    assert finding(dense, "DSL, graph, cache", "recurrence language").status == "not applicable"
    assert "layers 0-2,4-6" in finding(hybrid, "DSL, graph, cache", "recurrence language").evidence
    space = finding(reported(declare(str(tiny("nemotron_h")))), "DSL, graph, cache", "recurrence language")
    assert space.status == "not yet"
    assert space.evidence.startswith("mamba2/eager in layers 0,2 is written by hand")
    assert "all 8 experts, of which each token visits 2" in finding(hybrid, "balance", "experts").evidence


def test_quantise_quotes_the_refusal_of_the_policy(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    before = finding(reported(declare(str(tiny("deepseek_v32")))), "quantise", "index path")
    assert "the policy refuses mxfp8: MXFP8 in groups of 32 is not available yet" in before.evidence
    monkeypatch.setattr("firstlight.quant.policy.DTYPES", ("float32", "mxfp8"))
    after = finding(reported(declare(str(tiny("deepseek_v32")))), "quantise", "index path")
    assert "mxfp8 is available and was not asked for" in after.evidence


def test_fuse_is_done_once_a_fused_body_runs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = declare(str(tiny("llama")))
    assert statuses(reported(declared))["fuse"] == "not yet"
    module = ModuleType("fused_for_this_test")
    module.rms_norm = declared.table["rms_norm"].impl("eager").load()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    declared.table.register("rms_norm", "", Impl("quick", f"{module.__name__}:rms_norm", rank=99))
    report = reported(declared)
    assert statuses(report)["fuse"] == "done"
    assert "rms_norm/quick" in finding(report, "fuse", "kernels").evidence


def test_fuse_quotes_why_a_fused_body_was_refused(tiny: Tiny) -> None:
    declared = declare(str(tiny("llama")))
    refusing = Impl("fused", "firstlight.ops.norm.fused:rms_norm", lambda ctx: f"needs a GPU, not {ctx.device}", 99)
    declared.table.register("rms_norm", "", refusing)
    report = reported(declared)
    assert statuses(report)["fuse"] == "not yet"
    assert finding(report, "fuse", "refused").evidence == "rms_norm/fused: needs a GPU, not cpu"


def test_keys_let_pass_are_held_against_decompose(tiny: Tiny) -> None:
    report = reported(replace(declare(str(tiny("llama"))), unknown_keys=("warp_factor",)))
    assert statuses(report)["decompose"] == "not yet"
    assert "warp_factor" in finding(report, "decompose", "config keys").evidence


def test_a_part_that_only_the_reference_runs_is_not_reuse(tiny: Tiny) -> None:
    declared = declare(str(tiny("llama")))
    eager = declared.table["rope"].impl("eager")
    declared.table.register("rope", "", replace_rejects(eager, "this layout is new"))
    report = reported(declared)
    assert statuses(report)["reuse"] == "not yet"
    assert any("this layout is new" in f.evidence for s in report.steps if s.name == "reuse" for f in s.findings)


def replace_rejects(impl: Impl, reason: str) -> Impl:
    """Return a body that refuses everything."""
    return Impl(impl.name, impl.target, lambda ctx: reason, impl.rank)


def test_failed_proof_is_reported_with_a_command(tiny: Tiny) -> None:
    strict = replace(QUICK, tolerance=1e-12, model="./here", flags=("--port", "p.py"))
    report = reported(declare(str(tiny("llama"))), options=strict)
    assert not report.passed
    assert statuses(report)["prove"] == "not yet"
    assert "FAILED, first at " in finding(report, "prove", "equal to the reference").evidence
    assert report.repro.startswith("firstlight verify ./here ")
    assert report.repro.endswith("--tokens 6 --reference ref --port p.py")


def test_auto_takes_transformers_where_it_knows_the_model(tiny: Tiny) -> None:
    report = reported(declare(str(tiny("llama"))), options=replace(QUICK, reference="auto"))
    assert report.reference == "transformers"
    assert report.proof.reference.startswith("transformers ")


@pytest.mark.parametrize(
    "error", [FirstlightError("cannot build", why="it is unknown"), ImportError("cannot build, it is unknown")]
)
def test_auto_falls_back_to_our_own_reference_and_says_why(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("firstlight.verify.run.HFOracle", refuses)
    report = reported(declare(str(tiny("llama"))), options=replace(QUICK, reference="auto"))
    assert (report.reference, report.passed) == ("ref", True)
    assert "cannot build" in report.reference_reason
    assert "it is unknown" in report.reference_reason


def test_a_reference_asked_for_has_no_substitute(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise FirstlightError("cannot build")

    monkeypatch.setattr("firstlight.verify.run.HFOracle", refuses)
    with pytest.raises(FirstlightError, match="cannot build"):
        reported(declare(str(tiny("llama"))), options=replace(QUICK, reference="transformers"))


def test_demo_writes_text() -> None:
    report = reported(declare("demo"), options=replace(QUICK, prompt="hello", max_tokens=3))
    assert report.written.prompt == "hello"
    assert 1 <= len(report.written.ids) <= 3
    assert str(report.written.ids[0]) not in report.written.text.split()


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (("done", "done"), "done"),
        (("done", "not applicable"), "done"),
        (("done", "not yet"), "not yet"),
        (("not applicable", "not yet"), "not yet"),
        (("not applicable",), "not applicable"),
    ],
)
def test_a_step_is_as_far_as_its_weakest_finding(given: tuple[str, ...], status: str) -> None:
    findings = tuple(Finding(topic="t", status=one, evidence="e") for one in given)  # type: ignore[arg-type]
    assert Step(name="s", findings=findings).status == status
