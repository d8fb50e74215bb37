"""A Plan read back from its JSON, possibly edited, and checked against the model that it shall run."""

from __future__ import annotations

from pathlib import Path

from firstlight.errors import FirstlightError
from firstlight.ops.registry import OperatorTable
from firstlight.plan.planner import Plan, Planner, read_parallel
from firstlight.spec.arch import ArchSpec
from firstlight.spec.files import load_json

FIX = "firstlight plan MODEL --json > plan.json    writes one that fits"


def read_plan(path: Path, arch: ArchSpec, table: OperatorTable) -> Plan:
    """Return the Plan in a file, its bodies exactly as written there.

    Raises: FirstlightError if it is no plan, of another model, binds too little, or asks for what is not available.
    """
    where = str(path)
    if not path.is_file():
        raise FirstlightError("no such plan", where=where, why="there is no file of that name", fix=FIX)
    try:
        plan = Plan.from_dict(load_json(path, fix=FIX))
    except FirstlightError as error:
        error.where = error.where or where
        raise
    if (plan.model_type, plan.num_layers) != (arch.model_type, len(arch.layers)):
        raise FirstlightError(
            f"the plan is for {plan.model_type} with {plan.num_layers} layers",
            where=where,
            why=f"the model is {arch.model_type} with {len(arch.layers)} layers",
            fix=FIX,
        )
    if not isinstance(plan.parallel, dict):
        raise FirstlightError("this is not a plan", where=where, why='"parallel" maps axes to sizes', fix=FIX)
    _check_device(plan.device, where)
    usual = Planner(arch, table).build(graph_mode=plan.graph_mode)
    _check_bindings(plan, usual, where)
    for binding in plan.bindings:
        table[binding.op].impl(binding.impl)
    read_parallel("+".join(f"{axis}={size}" for axis, size in plan.parallel.items()))
    if plan.graph_mode and not usual.graph_mode:
        raise FirstlightError(
            "the plan asks for graph_mode", where=where, why=usual.refused[0].reason, fix='"graph_mode": false'
        )
    return plan


def _check_device(device: str, where: str) -> None:
    import torch

    here = ["cpu"]
    if torch.cuda.is_available():
        here += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device not in here:
        raise FirstlightError(
            f"the plan is for device {device!r}",
            where=where,
            why=f"this machine has {', '.join(here)}",
            fix='"device": "cpu"',
        )


def _check_bindings(plan: Plan, usual: Plan, where: str) -> None:
    have = {(b.layer, b.stage, b.op) for b in plan.bindings}
    needed = {(b.layer, b.stage, b.op) for b in usual.bindings}
    for title, found in (("lacks", needed - have), ("has unknown", have - needed)):
        if found:
            layer, stage, op = min(found, key=str)
            place = "outside the layers" if layer is None else f"of layer {layer}"
            raise FirstlightError(
                f"the plan {title} bindings: {len(found)}, such as {op} {place} in {stage}",
                where=where,
                why="every operator that the model uses is bound exactly once per layer and stage",
                fix=FIX,
            )
    if len(have) != len(plan.bindings):
        raise FirstlightError(
            "the plan binds an operator twice", where=where, why="one body runs per layer and stage", fix=FIX
        )
