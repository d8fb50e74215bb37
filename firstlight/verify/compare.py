"""Compares one layer with its reference, every module fed the reference's own inputs.

One layer's error so stays that layer's. T tokens, K chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.errors import FirstlightError
from firstlight.layers.context import LayerCache, LayerContext, Named, Ops
from firstlight.layers.indexer import IndexLayer
from firstlight.layers.moe import RouterLayer
from firstlight.layers.norm import NormLayer
from firstlight.verify.choices import Choices, Verdict, judge_routing, judge_selection, visible
from firstlight.verify.difference import FAILED, Difference, difference, judge
from firstlight.verify.hints import Known, Norming, explain
from firstlight.verify.oracle import Call, Trace, tensors
from firstlight.verify.report import Check, Kind

# what a module raises on inputs that its declaration does not fit; FirstlightError is a ValueError
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

    def run(self, only: str | None = None) -> list[Check]:
        """Return the checks of every module that has a counterpart, in order of execution, states after their mixer.

        only: the path of the one module to compare.
        """
        modules = dict(self.layer.named_modules())
        for path in ordered(modules) if only is None else (only,):
            call = self.trace.calls.get(path)
            if call is not None:
                self._module(path, modules[path], call)
        return self.checks

    def _module(self, path: str, module: nn.Module, call: Call) -> None:
        takes = arity(module)
        if takes is None or len(call.inputs) < takes or not complete(module):
            return
        ctx = self.context()
        used: set[str] = set()
        chooses = isinstance(module, (IndexLayer, RouterLayer))
        # a chooser is judged by its own choice, what comes after it by the reference's where they tie
        recorded = RecordingOps(ctx.ops if chooses else self.choices.follow(ctx.ops))
        ctx = LayerContext(recorded, ctx.rows, watched(ctx.cache, used), ctx.scratch)
        last = recorded if list(inspect.signature(module.forward).parameters)[-1] == "ops" else ctx
        try:
            with torch.inference_mode():
                ours = tensors(module(*call.inputs[:takes], last))
        except MISFITS as error:
            self._add(path, "module", FAILED, call.name, note=cannot_run(error))
            return
        if isinstance(module, RouterLayer):
            self._router(path, ours, call, recorded)
        elif isinstance(module, IndexLayer):
            self._selection(path, ours[0], call, recorded)
        else:
            self._tensors(path, ours, call, ctx.rows.num_tokens)
        if path == "mixer":
            self._unused(ctx.cache, used)
            self._states(ctx, call.name)

    def _tensors(self, path: str, ours: tuple[Tensor, ...], call: Call, num_tokens: int) -> None:
        known = self._known(path, call)
        for tensor, theirs in counterparts(ours, call.outputs):
            # rows of a norm over heads are tokens times heads
            found = difference(*(by_token(t, num_tokens) for t in (tensor, theirs)))
            known = replace(known, positions=len(theirs) == num_tokens)
            hint = "" if found.relative <= self.tolerance else explain(tensor, theirs, known)
            note = self._layer_note(path, found)
            self._add(path, "layer" if path == "" else "module", found, call.name, note=note, hint=hint)

    def _known(self, path: str, call: Call) -> Known:
        """Return what the declaration says about a module, for the hints."""
        spec = getattr(self.layer.mixer, "spec", None) if path.partition(".")[0] == "mixer" else None
        sizes = {f.name: getattr(spec, f.name) for f in fields(spec)} if is_dataclass(spec) else {}
        heads = tuple(n for name, n in sizes.items() if "heads" in name and isinstance(n, int))
        found = norming(self.layer.get_submodule(path), call)
        return Known(heads=heads, window=sizes.get("sliding_window"), norming=found)

    def _unused(self, cache: LayerCache, used: set[str]) -> None:
        for kind, names in (("pages", cache.pages), ("states", cache.states)):
            for name in names:
                if name not in used:
                    note = f"declare() keeps the {kind} {name!r}, which forward never touches"
                    hint = "leave it out of declare(), or read and write it in forward"
                    self.checks.append(
                        Check.fault("caches", layer=self.index, module=f"mixer.{name}", note=note, hint=hint)
                    )

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
                # a delta rule keeps [K, V] there, a state-space recurrence [P, N] as here
                ways = (kept, kept.mT) if kept.ndim > 1 else (kept,)
                found = [difference(ours, way) for way in ways if way.shape == ours.shape]
                if found:
                    self._add(f"mixer.{state}", "state", min(found, key=lambda f: f.relative), f"{name} cache")

    def _router(self, path: str, ours: tuple[Tensor, ...], call: Call, recorded: RecordingOps) -> None:
        if self.choices.routing is None:
            return
        args, options = recorded.calls["router"]
        weights_TK, ids_TK = self.choices.routing
        verdict = judge_routing(ours[1], ids_TK, *args, **options)
        kept = torch.ones(len(ids_TK), dtype=torch.bool)
        kept[list(verdict.tied)] = False
        num_experts = args[1].shape[0]
        mine_TE, theirs_TE = (dense(w, ids, num_experts)[kept] for w, ids in (ours, (weights_TK, ids_TK)))
        found = difference(mine_TE, theirs_TE)
        note = f"{len(verdict.wrong)} of {len(ids_TK)} tokens go to other experts" if verdict.wrong else ""
        if ours[1].shape != ids_TK.shape:
            note += f": {ours[1].shape[1]} each, the reference {ids_TK.shape[1]}"
        hint = "" if note or found.relative <= self.tolerance else explain(mine_TE, theirs_TE)
        self._add(path, "module", found, call.name, note=note or ties(verdict), hint=hint)

    def _selection(self, path: str, slots_TK: Tensor, call: Call, recorded: RecordingOps) -> None:
        if self.choices.selection_TK is None:
            return
        (q, weights, keys, rows, latent), options = recorded.calls["index_topk"]
        theirs_TK = visible(self.choices.selection_TK, rows)
        found = judge_selection(slots_TK, theirs_TK, q, weights, keys, rows, latent, **options)
        wrong = found.wrong
        most, theirs_most = (int((chosen >= 0).sum(1).max()) for chosen in (slots_TK, theirs_TK))
        sizes = f": at most {most}, the reference {theirs_most}" if most != theirs_most else ""
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
                note=f"{len(wrong)} of {len(slots_TK)} tokens select other entries{sizes}" if wrong else ties(found),
            )
        )

    def _add(self, path: str, kind: Kind, found: Difference, reference: str, note: str = "", hint: str = "") -> None:
        at, tolerance = self.index, self.tolerance
        check = judge(
            found, layer=at, module=path, kind=kind, tolerance=tolerance, reference=reference, note=note, hint=hint
        )
        self.checks.append(check)


def norming(module: nn.Module, call: Call) -> Norming | None:
    """Return what is known where a norm differs, None of any other module."""
    if not isinstance(module, NormLayer):
        return None
    centred = module.spec.kind == "layer"
    return Norming(x=call.inputs[0], weight=module.get_parameter("weight"), eps=module.spec.eps, centred=centred)


def cannot_run(error: Exception) -> str:
    """Return the note on a module that raised one of MISFITS."""
    told = f"{error.what}, in {error.where}" if isinstance(error, FirstlightError) else str(error)
    return f"cannot run on the reference's input: {told}"


def complete(module: nn.Module) -> bool:
    """True if every parameter of a module has been filled."""
    return not any(parameter.is_meta for parameter in module.parameters())


class Watched(Named):
    """A mapping that leaves the names asked for in `used`."""

    def __init__(self, items: Mapping[str, Any], used: set[str]) -> None:
        super().__init__(items)
        self.used = used

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


def watched(cache: LayerCache, used: set[str]) -> LayerCache:
    """Return the same memory, which tells what of it is asked for."""
    return LayerCache(Watched(cache.pages, used), Watched(cache.states, used))


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


def by_token(x: Tensor, num_tokens: int) -> Tensor:
    """Return [T, R, ...] of the rows [T * R, ...] of T tokens; other tensors as they are."""
    rows = len(x) if x.ndim else 0
    return x.reshape(num_tokens, -1, *x.shape[1:]) if rows > num_tokens and rows % num_tokens == 0 else x


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
