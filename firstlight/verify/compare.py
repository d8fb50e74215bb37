"""Compares one layer with its reference, every module fed the reference's own inputs.

One layer's error so stays that layer's. T tokens, K chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.layers.context import LayerContext, Ops
from firstlight.layers.indexer import IndexLayer
from firstlight.layers.moe import RouterLayer
from firstlight.verify.choices import Choices, Verdict, judge_routing, judge_selection, visible
from firstlight.verify.difference import FAILED, Difference, difference, judge
from firstlight.verify.oracle import Call, Trace, tensors
from firstlight.verify.report import Check, Kind

# what a module raises on inputs that its declaration does not fit
MISFITS = (RuntimeError, ValueError, IndexError, TypeError)


class LayerComparison:
    """Runs our modules of one layer on the inputs of a Trace and collects Checks.

    context: makes a fresh LayerContext (own caches, zero history) for each run.
    """

    def __init__(
        self, index: int, layer: nn.Module, trace: Trace, context: Callable[[], LayerContext], tolerance: float
    ) -> None:
        self.index, self.layer, self.trace, self.context, self.tolerance = index, layer, trace, context, tolerance
        self.choices = Choices.of(layer, trace)
        self.checks: list[Check] = []

    def run(self) -> list[Check]:
        """Return the checks of every module that has a counterpart, in order of execution, states after their mixer."""
        modules = dict(self.layer.named_modules())
        for path in ordered(modules):
            call = self.trace.calls.get(path)
            if call is not None:
                self._module(path, modules[path], call)
        return self.checks

    def _module(self, path: str, module: nn.Module, call: Call) -> None:
        takes = arity(module)
        if takes is None or len(call.inputs) < takes:
            return
        ctx = self.context()
        chooses = isinstance(module, (IndexLayer, RouterLayer))
        # a chooser is judged by its own choice, what comes after it by the reference's where they tie
        recorded = RecordingOps(ctx.ops if chooses else self.choices.follow(ctx.ops))
        ctx = LayerContext(recorded, ctx.rows, ctx.cache, ctx.scratch)
        last = recorded if list(inspect.signature(module.forward).parameters)[-1] == "ops" else ctx
        try:
            with torch.inference_mode():
                ours = tensors(module(*call.inputs[:takes], last))
        except MISFITS as error:
            self._add(path, "module", FAILED, call.name, note=f"cannot run on the reference's input: {error}")
            return
        if isinstance(module, RouterLayer):
            self._router(path, ours, call, recorded)
        elif isinstance(module, IndexLayer):
            self._selection(path, ours[0], call, recorded)
        else:
            self._tensors(path, ours, call)
        if path == "mixer":
            self._states(ctx, call.name)

    def _tensors(self, path: str, ours: tuple[Tensor, ...], call: Call) -> None:
        pairs = [(tensor, theirs, difference(tensor, theirs)) for tensor, theirs in counterparts(ours, call.outputs)]
        for _, _, found in pairs:
            self._add(path, "layer" if path == "" else "module", found, call.name, note=self._layer_note(path, found))

    def _layer_note(self, path: str, found: Difference) -> str:
        """Return which counterparts were taken, where a layer is wrong though all its modules are right."""
        inner = [c for c in self.checks if c.kind in ("module", "selection")]
        if path or found.relative <= self.tolerance or not all(check.passed for check in inner):
            return ""
        direct = [f"{c.module} = {c.reference.rpartition('.')[2]}" for c in inner if "." not in c.module]
        return "each module equals what the name map makes its counterpart: " + ", ".join(dict.fromkeys(direct))

    def _states(self, ctx: LayerContext, name: str) -> None:
        for state, theirs in self.trace.states.items():
            if state in ctx.cache.states:
                view = ctx.cache.states[state]
                ours = view.data[int(view.slots_R[0])]
                # the reference may keep a longer window than the W - 1 inputs that matter
                kept = theirs[-ours.shape[0] :] if state == "conv" else theirs
                self._add(f"mixer.{state}", "state", difference(ours, kept), f"{name} cache")

    def _router(self, path: str, ours: tuple[Tensor, ...], call: Call, recorded: RecordingOps) -> None:
        if self.choices.routing is None:
            return
        args, options = recorded.calls["router"]
        weights_TK, ids_TK = self.choices.routing
        verdict = judge_routing(ours[1], ids_TK, *args, **options)
        kept = torch.ones(len(ids_TK), dtype=torch.bool)
        kept[list(verdict.tied)] = False
        num_experts = args[1].shape[0]
        found = difference(dense(ours[0], ours[1], num_experts)[kept], dense(weights_TK, ids_TK, num_experts)[kept])
        note = f"{len(verdict.wrong)} of {len(ids_TK)} tokens go to other experts" if verdict.wrong else ""
        self._add(path, "module", found, call.name, note=note or ties(verdict))

    def _selection(self, path: str, slots_TK: Tensor, call: Call, recorded: RecordingOps) -> None:
        if self.choices.selection_TK is None:
            return
        (q, weights, keys, rows, latent), options = recorded.calls["index_topk"]
        theirs_TK = visible(self.choices.selection_TK, rows)
        found = judge_selection(slots_TK, theirs_TK, q, weights, keys, rows, latent, **options)
        wrong = found.wrong
        self.checks.append(
            Check(
                layer=self.index,
                module=path,
                kind="selection",
                error=float(len(wrong)),
                relative=len(wrong) / max(1, len(slots_TK)),
                tolerance=0.0,
                passed=not wrong,
                position=wrong[0] if wrong else None,
                recall=found.recall,
                reference=call.name,
                note=f"{len(wrong)} of {len(slots_TK)} tokens select other entries" if wrong else ties(found),
            )
        )

    def _add(self, path: str, kind: Kind, found: Difference, reference: str, note: str = "") -> None:
        check = judge(
            found, layer=self.index, module=path, kind=kind, tolerance=self.tolerance, reference=reference, note=note
        )
        self.checks.append(check)


def ties(verdict: Verdict) -> str:
    """Return a note on tokens that chose differently among equals."""
    return f"{len(verdict.tied)} tokens chose among ties" if verdict.tied else ""


def counterparts(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results: in order where all shapes agree, else each of ours with the first of its shape."""
    if [t.shape for t in ours] == [t.shape for t in theirs]:
        return list(zip(ours, theirs, strict=True))
    floating = [t for t in theirs if t.is_floating_point()]
    same = [(tensor, [t for t in floating if t.squeeze().shape == tensor.squeeze().shape]) for tensor in ours]
    return [(tensor, found[0].reshape(tensor.shape)) for tensor, found in same if found]


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class RecordingOps(Ops):
    """Ops that remember the last arguments of each operator."""

    __slots__ = ("calls",)

    def __init__(self, ops: Ops) -> None:
        self.calls: dict[str, Arguments] = {}
        super().__init__({name: recording(self.calls, name, body) for name, body in ops.bodies.items()})


def recording(calls: dict[str, Arguments], name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body, which then leaves its arguments in calls. Holds no Ops: a cycle would keep tensors alive."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] = (args, kwargs)
        return body(*args, **kwargs)

    return call


def ordered(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return module paths innermost first, and otherwise in order of definition, which is that of execution."""
    names = list(modules)

    def rank(path: str) -> tuple[int, ...]:
        parts = path.split(".") if path else []
        # a parent follows its children: pad with a number above any sibling's
        return tuple(names.index(".".join(parts[: k + 1])) for k in range(len(parts))) + (len(names),)

    return sorted(names, key=rank)


def arity(module: nn.Module) -> int | None:
    """Return how many tensors a module takes before its `ops` or `ctx`, None if it is not called that way."""
    if type(module).forward is nn.Module.forward:
        return None
    names = list(inspect.signature(module.forward).parameters)
    return len(names) - 1 if names and names[-1] in ("ops", "ctx") else None


def dense(weights_TK: Tensor, ids_TK: Tensor, num_experts: int) -> Tensor:
    """Return the routing weights as [T, E], zero where an expert was not chosen."""
    out = torch.zeros(ids_TK.shape[0], num_experts)
    return out.scatter_(1, ids_TK.long(), weights_TK.float())
