"""Our own reference bodies as the reference: the same layers under the same plan, every operator bound to ref."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from firstlight.engine.runner import BoundPlan
from firstlight.layers.context import LayerCache, Scratch, StepContext
from firstlight.layers.decoder import Decoder
from firstlight.layers.indexer import IndexLayer
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache
from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Rows
from firstlight.plan.planner import Plan
from firstlight.spec.caches import CacheDtypes
from firstlight.verify.choices import positions_of
from firstlight.verify.oracle import Call, Recorder, Trace, Visit

Loaded = Callable[[str], AbstractContextManager[None]]


class RefOracle:
    """The decoder run by ref.py bodies. loaded: makes a block's weights present while a `with` lasts."""

    def __init__(self, model: Decoder, plan: Plan, table: OperatorTable, loaded: Loaded) -> None:
        self.description = "firstlight reference operators (ref.py, fp32)"
        self.independent = False
        self.notices: tuple[str, ...] = ()
        self.model, self.loaded = model, loaded
        self.bound = BoundPlan(plan.with_impl("ref", "the reference"), table)

    def run(self, ids_T: Tensor, layers: range, visit: Visit) -> Tensor | None:
        """See Oracle."""
        rows, scratch = Rows.of([(0, ids_T.shape[0])]), Scratch()
        ops = self.bound.step(rows, ()).model_ops
        with torch.inference_mode():
            with self.loaded("embed"):
                x = self.model.begin(ids_T, ops)
            for index in range(layers.stop):
                x = self._layer(index, x, rows, scratch, visit if index in layers else None)
            if layers.stop < len(self.model.layers):
                return None
            with self.loaded("norm"), self.loaded("head"), self.loaded("embed"):
                recorder = Recorder({"norm": ("norm", self.model.norm)})
                hidden = self.model.end(x, ops)
                visit(None, Trace(recorder.take()))
                recorder.close()
                return self.model.logits(hidden, ops).float()

    def contradiction(self, ids_T: Tensor, logits_TV: Tensor) -> str:
        """Return "": one truth cannot contradict itself."""
        return ""

    def _layer(self, index: int, x: Tensor, rows: Rows, scratch: Scratch, visit: Visit | None) -> Tensor:
        layer, path = self.model.layers[index], f"layers.{index}"
        caches, states = layer_memory(self.model, index, rows.num_tokens)
        step = StepContext(
            rows, self.bound.step(rows, ()).model_ops, self.bound.step(rows, ()).layer_ops, caches, scratch
        )
        recorder = Recorder({name: (f"{path}.{name}".rstrip("."), module) for name, module in layer.named_modules()})
        with self.loaded(path):
            y: Tensor = layer(x, step.layer(index))
        recorder.close()
        if visit is not None:
            calls = {
                name: in_positions(call, layer.get_submodule(name), caches[index])
                for name, call in recorder.take().items()
            }
            visit(index, Trace(calls, states()))
        return y


def in_positions(call: Call, module: nn.Module, cache: LayerCache) -> Call:
    """Return the call with physical slots turned into positions, where the module selects."""
    if not isinstance(module, IndexLayer):
        return call
    return Call(call.name, call.inputs, tuple(positions_of(slots, cache.pages["latent"]) for slots in call.outputs))


def layer_memory(
    model: Decoder, index: int, num_tokens: int
) -> tuple[tuple[LayerCache, ...], Callable[[], dict[str, Tensor]]]:
    """Return fp32 caches for one sequence in which only layer `index` has memory, and a reader of its states."""
    decl = model.arch.layers[index].mixer.declare(CacheDtypes(kv="float32", index="float32", state="float32"))
    pool = CachePool([decl], num_tokens=max(num_tokens, 1), num_slots=1)
    sequence = SequenceCache(pool.blocks)
    sequence.reserve(num_tokens)
    (cache,) = pool.views([sequence.hold(num_tokens)])
    empty = LayerCache()
    caches = tuple(cache if i == index else empty for i in range(len(model.layers)))
    return caches, lambda: {name: state.data[sequence.slot].clone() for name, state in cache.states.items()}
