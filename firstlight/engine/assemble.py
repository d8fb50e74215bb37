"""From a ModelSource to something that runs: declaration, plan, parameters, memory.

The one way in: every verb and the API come through here, so that none can forget a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from firstlight.engine.runner import Runner
from firstlight.errors import FirstlightError
from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.memory.arena import CachePool
from firstlight.models.declare import read_arch
from firstlight.models.registry import Port, find_port
from firstlight.ops.registry import OperatorTable
from firstlight.plan.planner import Plan, Planner
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.arch import ArchSpec
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import check_tied, load_into, resolve
from firstlight.weights.report import LoadReport, summarise
from firstlight.weights.source import ModelSource, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A model taken apart: its source, port, declaration, and the keys that were let pass."""

    source: ModelSource
    port: Port
    arch: ArchSpec
    table: OperatorTable
    unknown_keys: tuple[str, ...] = ()

    def planner(self) -> Planner:
        """Return a Planner for this declaration."""
        return Planner(self.arch, self.table)

    def plan(self, precision: PrecisionPolicy | None = None) -> Plan:
        """Return the default Plan."""
        return self.planner().build(precision=precision, unknown_keys=self.unknown_keys)


def declare(
    model: str, *, port_file: Path | None = None, allow_unknown_keys: bool = False, config_only: bool = False
) -> Declared:
    """Return the declaration of a MODEL argument. Raises: FirstlightError."""
    source = locate(model, config_only=config_only)
    port = find_port(source.model_type, port_file=port_file, where=source.where)
    arch, unknown = read_arch(source.raw, port, where=source.where, allow_unknown_keys=allow_unknown_keys)
    return Declared(source=source, port=port, arch=arch, table=port.operators(), unknown_keys=unknown)


def load_decoder(
    declared: Declared, dtype: torch.dtype, *, device: str = "cpu", progress: Callable[[int], None] | None = None
) -> tuple[Decoder, LoadReport]:
    """Return the decoder with every parameter loaded, strictly, and what the loader did. Raises: FirstlightError."""
    folder = declared.source.require_folder("running a model")
    model = Decoder.build(declared.arch, dtype)
    with Checkpoint.open(folder) as checkpoint:
        names = declared.port.names.at(len(declared.arch.layers))
        load_plan = resolve(targets(model), names, checkpoint)
        num_bytes = load_into(load_plan, checkpoint, device=device, progress=progress)
        report = summarise(load_plan, checkpoint, num_bytes=num_bytes, notices=check_tied(load_plan, checkpoint))
    return model.to(device).eval(), report


def build_runner(
    declared: Declared,
    plan: Plan,
    *,
    num_tokens: int,
    num_slots: int = 1,
    vocab_size: int | None = None,
    poison: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[Runner, LoadReport]:
    """Return a Runner with memory for num_tokens tokens and num_slots states in all, and the loader's report.

    poison: see CachePool. Raises: FirstlightError.
    """
    if plan.num_layers != len(declared.arch.layers) or plan.model_type != declared.arch.model_type:
        raise FirstlightError(
            f"the plan is for {plan.model_type} with {plan.num_layers} layers",
            why=f"the model is {declared.arch.model_type} with {len(declared.arch.layers)}",
            fix="firstlight plan --json on this model",
        )
    dtype: torch.dtype = getattr(torch, plan.precision.backbone)
    model, report = load_decoder(declared, dtype, device=plan.device, progress=progress)
    dtypes = plan.precision.cache_dtypes()
    decls = [layer.mixer.declare(dtypes) for layer in declared.arch.layers]
    pool = CachePool(decls, num_tokens=num_tokens, num_slots=num_slots, device=plan.device, poison=poison)
    return Runner(model, plan, declared.table, pool, vocab_size=vocab_size), report
