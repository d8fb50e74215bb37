"""Planner: ArchSpec + operator table -> Plan. The Plan is data; running it needs nothing else decided.

A binding names the body of one operator in one layer and stage, why it was chosen, and why each
other body was not. Editing the JSON of a Plan and running it changes the body used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from firstlight.errors import EXIT_MISSING_OPERATORS, FirstlightError, closest
from firstlight.ops.registry import Operator, OperatorTable
from firstlight.quant.policy import PrecisionPolicy
from firstlight.spec.arch import ArchSpec
from firstlight.spec.bind import BindContext

STAGES = ("prefill", "decode")
AXES = {
    "TP": "tensor parallelism",
    "EP": "expert parallelism",
    "PP": "pipeline parallelism",
    "DP": "data parallelism",
    "CP": "context parallelism",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A body that was not chosen, and why."""

    impl: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One operator in one layer (None: outside the layers) and stage."""

    layer: int | None
    stage: str
    op: str
    impl: str
    reason: str
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Something asked for that the plan does without, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which body runs where. parallel: axis -> size. unknown_keys: config keys that were let pass."""

    model_type: str
    num_layers: int
    device: str
    precision: PrecisionPolicy
    bindings: tuple[Binding, ...]
    parallel: dict[str, int]
    graph_mode: bool
    refused: tuple[Refusal, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    def impl(self, layer: int | None, stage: str, op: str) -> str:
        """Return the body bound there. Raises: KeyError."""
        for binding in self.bindings:
            if (binding.layer, binding.stage, binding.op) == (layer, stage, op):
                return binding.impl
        raise KeyError((layer, stage, op))

    def with_impl(self, impl: str, reason: str) -> Plan:
        """Return the plan with every operator bound to one body, such as the reference."""
        bindings = tuple(replace(binding, impl=impl, reason=reason, rejected=()) for binding in self.bindings)
        return replace(self, bindings=bindings)

    def bodies(self, table: OperatorTable, layer: int | None, stage: str) -> dict[str, Callable[..., Any]]:
        """Return operator name -> function for one layer and stage. Raises: FirstlightError for an unknown body."""
        chosen = [b for b in self.bindings if b.layer == layer and b.stage == stage]
        return {b.op: table[b.op].impl(b.impl).load() for b in chosen}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Return a Plan from `to_dict` data, possibly edited. Raises: FirstlightError if the form is wrong."""
        try:
            bindings = tuple(
                Binding(**{**b, "rejected": tuple(Rejected(**r) for r in b.get("rejected", ()))})
                for b in data["bindings"]
            )
            # a list or an object in the place of a name
            hash(bindings)
            rest = {
                key: value
                for key, value in data.items()
                if key not in ("bindings", "precision", "refused", "unknown_keys")
            }
            return cls(
                bindings=bindings,
                precision=PrecisionPolicy(**data["precision"]),
                refused=tuple(Refusal(**r) for r in data.get("refused", ())),
                unknown_keys=tuple(data.get("unknown_keys", ())),
                **rest,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FirstlightError(
                "this is not a plan", why=f"{type(error).__name__}: {error}", fix="firstlight plan --json > plan.json"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A body asked for by name. None matches any layer or stage."""

    op: str
    impl: str
    layer: int | None = None
    stage: str | None = None


@dataclass(slots=True)
class Planner:
    """Chooses a body for every operator of an ArchSpec."""

    arch: ArchSpec
    table: OperatorTable
    overrides: list[Override] = field(default_factory=list)

    def bind(self, layer: int | None, stage: str | None, op: str, impl: str) -> Planner:
        """Ask for a body. layer None: all layers; stage None: both. Raises: FirstlightError for a name nobody has."""
        self.table[op].impl(impl)
        if stage is not None and stage not in STAGES:
            raise FirstlightError(f"unknown stage {stage!r}", why=f"stages are {' and '.join(STAGES)}")
        if layer is not None and not 0 <= layer < len(self.arch.layers):
            raise FirstlightError(f"no layer {layer}", why=f"the model has layers 0 to {len(self.arch.layers) - 1}")
        if not any(op == name for _, _, name, _ in self._uses()):
            raise FirstlightError(
                f"operator {op} is not used by {self.arch.model_type}", fix=f"one of {', '.join(sorted(self._used()))}"
            )
        self.overrides.append(Override(op=op, impl=impl, layer=layer, stage=stage))
        return self

    def build(
        self,
        *,
        parallel: str = "",
        graph_mode: bool = False,
        precision: PrecisionPolicy | None = None,
        device: str = "cpu",
        unknown_keys: tuple[str, ...] = (),
    ) -> Plan:
        """Return the Plan.

        parallel: axes that may be used, "TP+EP+PP", or asked for with a size, "TP=2". An axis without
        a size that is not available is recorded as refused; a size above 1 that cannot run is an error.
        Raises: FirstlightError (exit code 3) if an operator is missing.
        """
        precision = precision or PrecisionPolicy(backbone=self.arch.dtype)
        self._require_operators()
        bindings = tuple(
            self._bind(layer, stage, op, noun, precision, device) for layer, stage, op, noun in self._uses()
        )
        sizes, refused = read_parallel(parallel)
        if graph_mode:
            refused += (Refusal(what="graph_mode", reason=f"whole-step graphs are not available yet on {device}"),)
        return Plan(
            model_type=self.arch.model_type,
            num_layers=len(self.arch.layers),
            device=device,
            precision=precision,
            bindings=bindings,
            parallel=sizes,
            graph_mode=False,
            refused=refused,
            unknown_keys=unknown_keys,
        )

    def _uses(self) -> Iterator[tuple[int | None, str, str, Any]]:
        for stage in STAGES:
            for op in dict.fromkeys(self.arch.operators()):
                yield None, stage, op, self.arch
            for index, layer in enumerate(self.arch.layers):
                nouns = {op: noun for noun in (layer.ffn, layer.mixer) for op in noun.operators()}
                for op in self.arch.layer_operators(index):
                    yield index, stage, op, nouns.get(op, self.arch.residual)

    def _used(self) -> set[str]:
        return {op for _, _, op, _ in self._uses()}

    def _require_operators(self) -> None:
        missing = sorted(op for op in self._used() if op not in self.table)
        if not missing:
            return
        first = next(layer for layer, _, op, _ in self._uses() if op in missing)
        raise FirstlightError(
            f"cannot run {self.arch.model_type}: {len(missing)} of {len(self._used())} operators missing",
            where="outside the layers" if first is None else f"layers[{first}]",
            why=f"no implementation of {', '.join(missing)}",
            fix="firstlight ops    lists what exists; a new operator lands with its reference first",
            exit_code=EXIT_MISSING_OPERATORS,
        )

    def _bind(
        self, layer: int | None, stage: str, op: str, noun: Any, precision: PrecisionPolicy, device: str
    ) -> Binding:
        operator = self.table[op]
        ctx = BindContext(stage=stage, dtype=precision.backbone, device=device, noun=noun)
        asked = self._asked(layer, stage, op)
        if asked is not None:
            reason = operator.impl(asked).rejects(ctx)
            if reason:
                raise FirstlightError(
                    f"{op}={asked} cannot run in layer {layer}, {stage}", why=reason, fix=f"drop --op {op}={asked}"
                )
            others = tuple(
                Rejected(impl=i.name, reason=f"{asked} was asked for") for i in operator.impls if i.name != asked
            )
            return Binding(layer=layer, stage=stage, op=op, impl=asked, reason="asked for", rejected=others)
        return choose(operator, ctx, layer)

    def _asked(self, layer: int | None, stage: str, op: str) -> str | None:
        for override in reversed(self.overrides):
            if override.op == op and override.layer in (None, layer) and override.stage in (None, stage):
                return override.impl
        return None


def choose(operator: Operator, ctx: BindContext, layer: int | None) -> Binding:
    """Return the binding to the body of highest rank that accepts the context."""
    verdicts = [(impl, impl.rejects(ctx)) for impl in operator.impls]
    usable = [impl for impl, reason in verdicts if reason is None]
    if not usable:
        reasons = "; ".join(f"{impl.name}: {reason}" for impl, reason in verdicts)
        raise FirstlightError(
            f"no body of {operator.name} can run in layer {layer}, {ctx.stage}",
            why=reasons,
            exit_code=EXIT_MISSING_OPERATORS,
        )
    best = usable[0]
    rejected = tuple(
        Rejected(impl=impl.name, reason=reason or f"valid, ranked below {best.name}")
        for impl, reason in verdicts
        if impl is not best
    )
    reason = "the only body that fits" if len(usable) == 1 else f"highest rank of {len(usable)} that fit"
    return Binding(layer=layer, stage=ctx.stage, op=operator.name, impl=best.name, reason=reason, rejected=rejected)


def read_parallel(text: str) -> tuple[dict[str, int], tuple[Refusal, ...]]:
    """Return (axis -> size, refusals) of a string such as "TP+EP" or "TP=1+CP". Raises: FirstlightError."""
    sizes = dict.fromkeys(AXES, 1)
    refused = []
    for word in (part.strip() for part in text.split("+") if text):
        axis, _, size = word.partition("=")
        axis = axis.upper()
        if axis not in AXES:
            near = closest(axis, tuple(AXES))
            raise FirstlightError(
                f"unknown parallel axis {axis!r}",
                why=f"axes are {', '.join(AXES)}",
                fix=f"did you mean {near}?" if near else "",
            )
        if size and not (size.isdigit() and int(size) >= 1):
            raise FirstlightError(f"{word!r} is not a size", fix=f"{axis}=1")
        if size and int(size) > 1:
            raise FirstlightError(
                f"{AXES[axis]} over {size} devices is not available yet",
                why="this version runs on one device",
                fix=f"{axis}=1",
            )
        if not size:
            refused.append(Refusal(what=axis, reason=f"{AXES[axis]} is not available yet: planned on one device"))
    return sizes, tuple(refused)
