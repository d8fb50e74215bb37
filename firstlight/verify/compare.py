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
from firstlight.verify.difference import Difference, difference, judge
from firstlight.verify.oracle import Call, Trace, tensors
from firstlight.verify.report import Check, Kind
from firstlight.verify.ties import choice_scores, index_scores, positions_of, tied


class LayerComparison:
    """Runs our modules of one layer on the inputs of a Trace and collects Checks.

    context: makes a fresh LayerContext (own caches, zero history) for each run.
    """

    def __init__(
        self, index: int, layer: nn.Module, trace: Trace, context: Callable[[], LayerContext], tolerance: float
    ) -> None:
        self.index, self.layer, self.trace, self.context, self.tolerance = index, layer, trace, context, tolerance
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
        recorded = RecordingOps(ctx.ops)
        ctx = LayerContext(recorded, ctx.rows, ctx.cache, ctx.scratch)
        last = recorded if list(inspect.signature(module.forward).parameters)[-1] == "ops" else ctx
        with torch.inference_mode():
            ours = tensors(module(*call.inputs[:takes], last))
        if isinstance(module, RouterLayer):
            self._router(path, ours, call, recorded)
        elif isinstance(module, IndexLayer):
            self._selection(path, ours[0], call, recorded, ctx)
        else:
            self._tensors(path, ours, call)
        if path == "mixer":
            self._states(ctx, call.name)

    def _tensors(self, path: str, ours: tuple[Tensor, ...], call: Call) -> None:
        for tensor, theirs in counterparts(ours, call.outputs):
            self._add(path, "layer" if path == "" else "module", difference(tensor, theirs), call.name)

    def _states(self, ctx: LayerContext, name: str) -> None:
        for state, theirs in self.trace.states.items():
            if state in ctx.cache.states:
                view = ctx.cache.states[state]
                ours = view.data[int(view.slots_R[0])]
                # the reference may keep a longer window than the W - 1 inputs that matter
                kept = theirs[-ours.shape[0] :] if state == "conv" else theirs
                self._add(f"mixer.{state}", "state", difference(ours, kept), f"{name} cache")

    def _router(self, path: str, ours: tuple[Tensor, ...], call: Call, recorded: RecordingOps) -> None:
        pairs = [
            (w, i)
            for i in call.outputs
            if not i.is_floating_point()
            for w in call.outputs
            if w.is_floating_point() and w.shape == i.shape
        ]
        if not pairs:
            return
        args, options = recorded.calls["router"]
        scores_TE = choice_scores(*args, **options)
        their_weights, their_ids = pairs[0]
        mine, other = (dense(w, i, scores_TE.shape[1]) for w, i in ((ours[0], ours[1]), (their_weights, their_ids)))
        same = torch.tensor(
            [tied(s, set(a.tolist()), set(b.tolist())) for s, a, b in zip(scores_TE, ours[1], their_ids, strict=True)]
        )
        differs = (mine != 0) != (other != 0)
        ties = differs.any(1) & same
        found = difference(mine[~ties], other[~ties])
        self._add(
            path, "module", found, call.name, note=f"{int(ties.sum())} tokens chose among ties" if ties.any() else ""
        )

    def _selection(self, path: str, slots_TK: Tensor, call: Call, recorded: RecordingOps, ctx: LayerContext) -> None:
        found = [t for t in call.outputs if not t.is_floating_point() and t.ndim == 2]
        if not found:
            return
        args, options = recorded.calls["index_topk"]
        pool = options.get("pool_size", 1)
        scores_TS = index_scores(args[0], args[1], args[2], args[3])
        wrong, kept, total = [], 0, 0
        for t, (mine, theirs) in enumerate(
            zip(index_sets(positions_of(slots_TK, ctx.cache.pages["latent"])), index_sets(found[0]), strict=True)
        ):
            # the reference lists tokens after t where it has too few, and masks them later
            theirs = {position for position in theirs if position <= t}
            kept, total = kept + len(mine & theirs), total + len(theirs)
            groups = [{position // pool for position in side} for side in (mine, theirs)]
            if mine != theirs and not (max(groups[0] | groups[1]) < scores_TS.shape[1] and tied(scores_TS[t], *groups)):
                wrong.append(t)
        recall = kept / total if total else 1.0
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
                recall=recall,
                reference=call.name,
                note=f"{len(wrong)} of {len(slots_TK)} tokens select other entries" if wrong else "",
            )
        )

    def _add(self, path: str, kind: Kind, found: Difference, reference: str, note: str = "") -> None:
        check = judge(
            found, layer=self.index, module=path, kind=kind, tolerance=self.tolerance, reference=reference, note=note
        )
        self.checks.append(check)


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


def index_sets(positions_TK: Tensor) -> list[set[int]]:
    """Return a selection as a set of positions per token, padding dropped."""
    return [{position for position in row if position >= 0} for row in positions_TK.tolist()]
