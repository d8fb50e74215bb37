"""verify: one pass over the layers, ours beside the reference's, one layer's weights in memory at a time."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from firstlight.engine.assemble import Declared
from firstlight.engine.runner import BoundPlan
from firstlight.errors import FirstlightError
from firstlight.layers.context import LayerContext, Scratch, StepContext
from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.ops.rows import Rows
from firstlight.plan.planner import Plan
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.arch import Layer
from firstlight.spec.feedforward import MoE
from firstlight.spec.mixers import GQAttention, Mixer, MLAttention
from firstlight.spec.read import text_config
from firstlight.verify.choices import Choices
from firstlight.verify.compare import MISFITS, LayerComparison, cannot_run, complete, norming
from firstlight.verify.difference import FAILED, Difference, difference, judge
from firstlight.verify.hints import Known, explain
from firstlight.verify.oracle import Call, Oracle, Trace
from firstlight.verify.oracle_hf import HFOracle
from firstlight.verify.oracle_ref import RefOracle, layer_memory
from firstlight.verify.report import Check, Kind, VerifyReport
from firstlight.verify.whatif import WhatIf
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.faults import Fault, faults
from firstlight.weights.load import load_into, resolve, unload
from firstlight.weights.loadplan import below

# fp32 sums of a few thousand terms: 2^-24 * sqrt(4096) = 4e-6, with room for two orders of summation
TOLERANCE = 1e-5
REFERENCES = ("transformers", "ref")
FLIPS = "every module agrees: a near-tie in routing or selection can flip end to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to compare. num_tokens None: long enough for every selection, chunk and page to matter."""

    reference: str = "transformers"
    num_tokens: int | None = None
    layers: range | None = None
    tolerance: float = TOLERANCE
    seed: int = 0


class Verification:
    """A checkpoint under a Plan beside a reference. Its Plan's bodies run, in fp32."""

    def __init__(
        self, declared: Declared, plan: Plan, options: VerifyOptions, progress: Callable[[int], None] | None = None
    ) -> None:
        self.declared, self.options, self.progress = declared, options, progress or (lambda layer: None)
        self.plan = replace(plan, precision=PrecisionPolicy(backbone="float32"))
        self.folder = declared.source.require_folder("verification")
        self.model = Decoder.build(declared.arch, torch.float32)
        self.checkpoint = Checkpoint.open(self.folder)
        num_layers = len(declared.arch.layers)
        names = declared.port.names.at(num_layers)
        found = resolve(targets(self.model), names, self.checkpoint)
        if options.reference != "transformers":
            # our own operators cannot run without every tensor
            found.raise_if_bad(str(self.folder))
        self.faults = faults(found, self.checkpoint, names)
        self.load_plan = found.loadable() if self.faults else found
        self.bound = BoundPlan(self.plan, declared.table)
        self.layers = self._layers(num_layers)
        self.num_tokens = self._num_tokens()
        self.rows = Rows.of([(0, self.num_tokens)])
        self.checks = [of_weights(fault) for fault in self.faults]
        self.notices: dict[str, None] = dict.fromkeys(self.checkpoint.notices)
        self.whatif = WhatIf(declared.arch, text_config(declared.source.raw))
        self.forced, self.own = Scratch(), Scratch()
        self.x: Tensor | None = None

    def run(self) -> VerifyReport:
        """Return the report. Raises: FirstlightError if one side cannot be built."""
        began = time.perf_counter()
        oracle = self._oracle()
        generator = torch.Generator().manual_seed(self.options.seed)
        ids_T = torch.randint(0, self.declared.arch.vocab_size, (self.num_tokens,), generator=generator)
        whole = len(self.layers) == len(self.model.layers) and not self.faults
        with torch.inference_mode(), self.loaded("embed"):
            self.x = self.model.begin(ids_T, self._step(0).model_ops) if whole else None
        logits = self._pass(oracle, ids_T)
        if self.x is not None and logits is not None:
            self._logits(logits)
        failed = any(not check.passed for check in self.checks)
        if failed and logits is not None and (contradiction := oracle.contradiction(ids_T, logits)):
            self.notices.setdefault(contradiction)
        self.checkpoint.close()
        return VerifyReport(
            model=self.declared.source.name,
            model_type=self.declared.arch.model_type,
            port=self.declared.port.origin,
            reference=oracle.description,
            independent=oracle.independent,
            dtype="float32",
            num_tokens=self.num_tokens,
            layers=tuple(self.layers),
            checks=tuple(self.checks),
            seconds=time.perf_counter() - began,
            versions=versions(),
            notices=tuple(self.notices),
            unknown_keys=self.declared.unknown_keys,
        )

    def _pass(self, oracle: Oracle, ids_T: Tensor) -> Tensor | None:
        """Return the reference's logits, None where it stops: early, or at a tensor that the checkpoint lacks."""
        try:
            return oracle.run(ids_T, self.layers, self.visit)
        except FirstlightError as error:
            if not self.faults:
                raise
            self.notices.setdefault(f"nothing further was compared: {error.what}")
            return None

    def visit(self, index: int | None, trace: Trace) -> None:
        """Compare one layer (or what lies outside the layers) right after the reference ran it."""
        if index is None:
            self._outside(trace)
            return
        path = f"layers.{index}"
        with self.loaded(path):
            comparison = LayerComparison(
                index,
                self.model.layers[index],
                trace,
                lambda: self._context(index, self.forced),
                self.options.tolerance,
            )
            self.checks += self.whatif.explained(comparison, comparison.run())
            self._split(index, trace, comparison.choices)
            self._own_pass(index, comparison.choices)
        self.progress(index)

    def _own_pass(self, index: int, choices: Choices) -> None:
        if self.x is None:
            return
        ctx = self._context(index, self.own)
        try:
            with torch.inference_mode():
                self.x = self.model.layers[index](self.x, replace(ctx, ops=choices.follow(ctx.ops)))
        except MISFITS as error:
            self.x = None
            self._judge(FAILED, index, "", "layer", "our own pass", note=f"cannot run: {error}")

    @contextmanager
    def loaded(self, path: str) -> Iterator[None]:
        """Have the parameters below path in memory inside the block, and not after."""
        module = self.model.get_submodule(path) if path != "head" or self.model.head is not None else None
        if module is None or not any(parameter.is_meta for parameter in module.parameters()):
            yield
            return
        load_into(self.load_plan, self.checkpoint, prefix=path)
        self._look_for_nan(path)
        try:
            yield
        finally:
            unload(module)

    def _look_for_nan(self, path: str) -> None:
        for entry in self.load_plan.entries:
            target = entry.target
            if below(target.path, path) and not getattr(target.module, target.attribute)[target.index].isfinite().all():
                self.notices.setdefault(f"{entry.candidate.name} holds values that are not finite")

    def _oracle(self) -> Oracle:
        name = self.options.reference
        if name == "transformers":
            return HFOracle(self.folder, self.load_plan, len(self.model.layers), tied=self.model.head is None)
        if name == "ref":
            return RefOracle(self.model, self.plan, self.declared.table, self.loaded)
        raise FirstlightError(f"unknown reference {name!r}", why=f"it can be {' or '.join(REFERENCES)}")

    def _layers(self, num_layers: int) -> range:
        layers = self.options.layers or range(num_layers)
        if not layers or layers[0] < 0 or layers[-1] >= num_layers:
            raise FirstlightError(
                f"no layers {layers.start}-{layers.stop - 1}", why=f"the model has layers 0 to {num_layers - 1}"
            )
        first = layers[0]
        # a shared selection comes from the last layer that owns an indexer
        while shares_index(self.declared.arch.layers[first].mixer):
            first -= 1
        return range(first, layers.stop)

    def _num_tokens(self) -> int:
        """Return a length beyond every top-k, pool, chunk and page, or what was asked for."""
        most = self.declared.arch.max_position_embeddings
        asked = self.options.num_tokens
        if asked is not None and not 1 <= asked <= most:
            raise FirstlightError(f"--tokens {asked} is out of range", why=f"the model takes 1 to {most} tokens")
        # two scan chunks and pages of 64, and a ragged third
        needed = 130
        for layer in self.declared.arch.layers:
            mixer = layer.mixer
            if isinstance(mixer, MLAttention) and mixer.indexer:
                needed = max(needed, 2 * mixer.indexer.width)
            if isinstance(mixer, GQAttention) and mixer.sliding_window:
                needed = max(needed, mixer.sliding_window + 66)
            needed = max(needed, 2 * mixer.declare(self.plan.precision.cache_dtypes()).grid + 2)
        return asked or min(needed, most)

    def _step(self, index: int, scratch: Scratch | None = None) -> StepContext:
        caches, _ = layer_memory(self.model, index, self.num_tokens)
        step = self.bound.step(self.rows, caches)
        return replace(step, scratch=scratch or Scratch())

    def _context(self, index: int, scratch: Scratch) -> LayerContext:
        return self._step(index, scratch).layer(index)

    def _split(self, index: int, trace: Trace, choices: Choices) -> None:
        """Check that the mixer fed in pieces, the last tokens one by one, equals the mixer fed at once."""
        call = trace.calls.get("mixer")
        if call is None or self.num_tokens < 4 or not complete(self.model.get_submodule(f"layers.{index}.mixer")):
            return
        try:
            whole = self._mixer(index, call, choices, [self.num_tokens])
            found = difference(self._mixer(index, call, choices, pieces_of(self.num_tokens)), whole)
        except MISFITS:
            # reported where the mixer ran whole
            return
        self._judge(found, index, "mixer.split", "state", "our own mixer fed at once")

    def _judge(
        self,
        found: Difference,
        layer: int | None,
        module: str,
        kind: Kind,
        reference: str,
        scale: float = 1.0,
        note: str = "",
        hint: str = "",
    ) -> None:
        allowed = scale * self.options.tolerance
        check = judge(
            found, layer=layer, module=module, kind=kind, tolerance=allowed, reference=reference, note=note, hint=hint
        )
        self.checks.append(check)

    def _mixer(self, index: int, call: Call, choices: Choices, lengths: list[int]) -> Tensor:
        caches, _ = layer_memory(self.model, index, self.num_tokens)
        given = self.forced.selection_TK
        outputs, start = [], 0
        for n in lengths:
            rows = Rows.of([(start, n)])
            scratch = Scratch(None if given is None else given[start : start + n])
            ctx = replace(self.bound.step(rows, caches), scratch=scratch).layer(index)
            ctx = replace(ctx, ops=choices.follow(ctx.ops, start))
            with torch.inference_mode():
                mixer = self.model.get_submodule(f"layers.{index}.mixer")
                outputs.append(mixer(call.inputs[0][start : start + n], ctx))
            start += n
        return torch.cat(outputs)

    def _outside(self, trace: Trace) -> None:
        ops = self._step(0).model_ops
        for path, call in trace.calls.items():
            module = self.model.get_submodule(path) if path != "head" or self.model.head is not None else None
            if module is None or not call.inputs or not call.outputs:
                continue
            note = hint = ""
            try:
                with torch.inference_mode(), self.loaded(path):
                    if not complete(module):
                        continue
                    ours, known = module(call.inputs[0], ops), Known(norming=norming(module, call))
                found = difference(ours, call.outputs[0])
                hint = explain(ours, call.outputs[0], known) if found.relative > self.options.tolerance else ""
            except MISFITS as error:
                found, note = FAILED, cannot_run(error)
            self._judge(found, None, path, "module", call.name, note=note, hint=hint)

    def _logits(self, theirs: Tensor) -> None:
        """Compare our own pass, never fed by the reference. Errors of 2 L sub-layers add like independent ones."""
        assert self.x is not None, "the own pass runs with all layers"
        ops = self._step(0).model_ops
        with torch.inference_mode(), self.loaded("norm"), self.loaded("head"), self.loaded("embed"):
            ours = self.model.logits(self.model.end(self.x, ops), ops)
        agree = all(check.passed for check in self.checks) and any(map(chooses, self.declared.arch.layers))
        found, scale = difference(ours, theirs), math.sqrt(2 * len(self.model.layers))
        note = "" if found.relative <= scale * self.options.tolerance or not agree else FLIPS
        self._judge(found, None, "logits", "logits", "the reference's own pass", scale, note)


def of_weights(fault: Fault) -> Check:
    """Return the failed check of what does not fit between checkpoint and declaration."""
    layer = fault.layers[0] if fault.layers else None
    module = fault.name.rpartition(f"layers.{layer}.")[2] if fault.layers else fault.name
    note = fault.what + (f" in {fault.where}" if fault.where else "")
    return Check.fault("weights", layer=layer, module=module, note=note, hint=fault.fix)


def chooses(layer: Layer) -> bool:
    """True if a layer routes or selects, so that a near-tie can change what it computes."""
    return isinstance(layer.ffn, MoE) or (isinstance(layer.mixer, MLAttention) and layer.mixer.indexer is not None)


def shares_index(mixer: Mixer) -> bool:
    """True if the mixer reads the selection of an earlier layer."""
    return isinstance(mixer, MLAttention) and mixer.indexer is not None and mixer.indexer.mode == "shared"


def pieces_of(num_tokens: int) -> list[int]:
    """Return lengths that add up to num_tokens: an odd cut, the rest, and the last two tokens alone."""
    first = max(1, (num_tokens - 2) * 4 // 7)
    return [n for n in (first, num_tokens - 2 - first, 1, 1) if n]


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("firstlight", "torch", "transformers", "safetensors", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def verify(
    declared: Declared, plan: Plan, options: VerifyOptions, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Return the comparison of a checkpoint with a reference, layer by layer. Raises: FirstlightError."""
    return Verification(declared, plan, options, progress).run()
