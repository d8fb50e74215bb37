"""The mission's checklist for one model: which step is done, not applicable or not yet, and how one knows.

Every line is computed from the checklist, the plan, the operator table and the reports; what a planner
refuses is asked of the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from firstlight.engine.assemble import Declared
from firstlight.errors import FirstlightError
from firstlight.plan.planner import AXES, Plan
from firstlight.quant.policy import PLANNED, PrecisionPolicy
from firstlight.spec.arch import ArchSpec
from firstlight.spec.caches import CacheDecl
from firstlight.spec.checklist import Checklist
from firstlight.spec.feedforward import MoE
from firstlight.spec.mixers import DeltaRule, Mamba2
from firstlight.spec.parts import ranges
from firstlight.verify.report import VerifyReport
from firstlight.weights.report import LoadReport

Status = Literal["done", "not applicable", "not yet"]
RECURRENCE = "firstlight.recurrence"
RECURRENT: dict[type, str] = {DeltaRule: "delta_rule", Mamba2: "mamba2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One piece of evidence. topic: what of the step it is about."""

    topic: str
    status: Status
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the mission. It is done if something of it is done and nothing is left."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The weakest status of the findings; those that do not apply do not count unless all are so."""
        statuses = {finding.status for finding in self.findings}
        return "not yet" if "not yet" in statuses else "done" if "done" in statuses else "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the steps are judged by. text_tokens: new tokens generated."""

    declared: Declared
    checklist: Checklist
    plan: Plan
    load: LoadReport
    proof: VerifyReport
    text_tokens: int


def mission_steps(facts: Facts) -> tuple[Step, ...]:
    """Return the eight steps in their order."""
    steps: dict[str, Callable[[Facts], Iterable[Finding]]] = {
        "decompose": _decompose,
        "reuse": _reuse,
        "fuse": _fuse,
        "quantise": _quantise,
        "parallelise": _parallelise,
        "balance": _balance,
        "DSL, graph, cache": _dsl_graph_cache,
        "prove": _prove,
    }
    return tuple(Step(name=name, findings=tuple(find(facts))) for name, find in steps.items())


def _finding(topic: str, status: Status, evidence: str) -> Finding:
    return Finding(topic=topic, status=status, evidence=evidence)


def _decompose(facts: Facts) -> Iterable[Finding]:
    items, layers = facts.checklist.items, len(facts.declared.arch.layers)
    operators = {name for item in items for name in item.operators}
    yield _finding("parts", "done", f"{len(items)} distinct parts in {layers} layers, {len(operators)} operators")
    unknown = facts.declared.unknown_keys
    if unknown:
        text = f"{len(unknown)} keys of config.json were let pass unread: {', '.join(unknown)}"
        yield _finding("config keys", "not yet", text)
    else:
        yield _finding(
            "config keys", "done", f"every key of config.json is accounted for by {facts.declared.port.origin}"
        )
    skipped: Counter[str] = Counter()
    for group in facts.load.skipped:
        skipped[group.reason] += group.count
    text = f"{facts.load.tensors} checkpoint tensors fill every parameter"
    text += "".join(f"; {count} skipped: {reason}" for reason, count in skipped.items())
    yield _finding("tensors", "done", text)


def _reuse(facts: Facts) -> Iterable[Finding]:
    items = facts.checklist.items
    count = facts.checklist.count("reuse")
    yield _finding(
        "reuse", "done" if count else "not yet", f"{count} of {len(items)} parts run on operators that exist"
    )
    for item in items:
        if item.status != "reuse":
            yield _finding(f"{item.status}: {item.part}", "not yet", item.reason)


def _fuse(facts: Facts) -> Iterable[Finding]:
    table, bindings = facts.declared.table, facts.plan.bindings
    used = sorted({binding.op for binding in bindings})
    fused = {(op, impl.name) for op in used for impl in table[op].impls if is_fused(impl.target)}
    running = [binding for binding in bindings if (binding.op, binding.impl) in fused]
    bodies = sorted({f"{binding.op}/{binding.impl}" for binding in running})
    text = f"{len(running)} of {len(bindings)} bindings run a fused kernel" + (
        f": {', '.join(bodies)}" if bodies else ""
    )
    yield _finding("kernels", "done" if running else "not yet", text)
    refused = {f"{b.op}/{r.impl}: {r.reason}" for b in bindings for r in b.rejected if (b.op, r.impl) in fused}
    for text in sorted(refused):
        yield _finding("refused", "not yet", text)
    if not fused:
        yield _finding("table", "not yet", f"none of the {len(used)} operators in use has a fused body")


def is_fused(target: str) -> bool:
    """Return whether a body, "module:attribute", is a fused kernel: it lives in a module named so."""
    return target.partition(":")[0].rpartition(".")[2].startswith("fused")


def _quantise(facts: Facts) -> Iterable[Finding]:
    pages = {page.name for decl in declarations(facts.declared.arch, facts.plan) for page in decl.pages}
    precision = facts.plan.precision
    paths = (
        ("index", "index path", "index" in pages, precision.index, "mxfp8"),
        ("kv_cache", "key and latent cache", bool(pages - {"index"}), precision.kv_cache, "fp8"),
    )
    for path, topic, exists, format, wanted in paths:
        if not exists:
            yield _finding(topic, "not applicable", "the model has none")
        elif format in PLANNED:
            yield _finding(topic, "done", PLANNED[format])
        else:
            kept = precision.backbone if format == "auto" else format
            yield _finding(topic, "not yet", f"kept in {kept}; {refusal(precision, path, wanted)}")


def refusal(precision: PrecisionPolicy, path: str, format: str) -> str:
    """Return what the precision policy says to a format on one path, all others as they are."""
    try:
        replace(precision, **{path: format})
    except FirstlightError as error:
        return f"the policy refuses {format}: {error.why}"
    return f"{format} is available and was not asked for"


def _parallelise(facts: Facts) -> Iterable[Finding]:
    probe = facts.declared.planner().build(parallel="+".join(AXES))
    reasons = {refused.what: refused.reason for refused in probe.refused}
    has_experts = any(isinstance(layer.ffn, MoE) for layer in facts.declared.arch.layers)
    for axis, name in AXES.items():
        size = facts.plan.parallel.get(axis, 1)
        if size > 1:
            yield _finding(axis, "done", f"{name} over {size} devices")
        elif axis == "EP" and not has_experts:
            yield _finding(axis, "not applicable", f"{name}: the model has no experts")
        elif axis in reasons:
            yield _finding(axis, "not yet", reasons[axis])
        else:
            yield _finding(axis, "not applicable", f"{name} is available; the plan is for one device")


def _balance(facts: Facts) -> Iterable[Finding]:
    moes = [layer.ffn for layer in facts.declared.arch.layers if isinstance(layer.ffn, MoE)]
    devices = prod(facts.plan.parallel.values())
    if devices > 1:
        yield _finding("devices", "not yet", f"{devices} devices, and the plan holds no measure of their load")
        return
    yield _finding("devices", "not applicable", "the plan is for one device: no device waits for another")
    for moe in dict.fromkeys(moes):
        text = f"one device holds all {moe.num_experts} experts, of which each token visits {moe.num_experts_per_tok}"
        yield _finding("experts", "not applicable", text)
    if not moes:
        yield _finding("experts", "not applicable", "the model has none")


def _dsl_graph_cache(facts: Facts) -> Iterable[Finding]:
    yield from _dsl(facts)
    graph = facts.declared.planner().build(graph_mode=True)
    if facts.plan.graph_mode:
        yield _finding("graph", "done", f"whole steps run as graphs on {facts.plan.device}")
    elif graph.graph_mode:
        yield _finding("graph", "not yet", f"available on {graph.device} and was not asked for")
    else:
        yield _finding("graph", "not yet", "; ".join(f"the planner refuses: {r.reason}" for r in graph.refused))
    yield _cache(facts)


def _dsl(facts: Facts) -> Iterable[Finding]:
    mixers = [layer.mixer for layer in facts.declared.arch.layers]
    if not any(isinstance(mixer, tuple(RECURRENT)) for mixer in mixers):
        yield _finding("recurrence language", "not applicable", "the model has no recurrence")
        return
    table = facts.declared.table
    for noun, op in RECURRENT.items():
        layers = [i for i, mixer in enumerate(mixers) if isinstance(mixer, noun)]
        bodies = {b.impl: table[b.op].impl(b.impl).target for b in facts.plan.bindings if b.op == op}
        for name, target in bodies.items():
            generated = target.startswith(RECURRENCE)
            how = "generated from the one-step equation" if generated else f"written by hand ({target})"
            text = f"{op}/{name} in layers {ranges(layers)} is {how}"
            yield _finding("recurrence language", "done" if generated else "not yet", text)


def _cache(facts: Facts) -> Finding:
    decls = declarations(facts.declared.arch, facts.plan)
    roles = sorted({page.name for d in decls for page in d.pages} | {state.name for d in decls for state in d.states})
    per_token = sum(decl.bytes_per_token for decl in decls)
    per_sequence = sum(decl.bytes_per_sequence for decl in decls)
    text = f"roles {', '.join(roles)}: {per_token:,.0f} bytes per token, {per_sequence:,} bytes per sequence"
    splits = [check for check in facts.proof.checks if check.module == "mixer.split"]
    if not splits:
        return _finding("cache", "not yet", f"{text}; reading it back was not checked")
    worst = max(check.relative for check in splits)
    text += f"; fed in pieces as at once in {sum(c.passed for c in splits)} of {len(splits)} layers (worst {worst:.1e})"
    return _finding("cache", "done" if all(check.passed for check in splits) else "not yet", text)


def _prove(facts: Facts) -> Iterable[Finding]:
    proof, total = facts.proof, len(facts.declared.arch.layers)
    good = sum(check.passed for check in proof.checks)
    text = f"{good} of {len(proof.checks)} checks passed in {len(proof.layers)} of {total} layers"
    text += f", against {proof.reference}"
    first = proof.first_divergence
    if first is not None:
        text += f"; FAILED, first at {first.place}: {first.relative:.1e} where {first.tolerance:.0e} is allowed"
    if not proof.independent:
        text += "; this reference runs the same declaration, so the declaration itself is not proven"
    whole = proof.passed and proof.independent and len(proof.layers) == total
    yield _finding("equal to the reference", "done" if whole else "not yet", text)
    generates: Status = "done" if facts.text_tokens else "not yet"
    yield _finding("generates", generates, f"{facts.text_tokens} tokens under the plan")


def declarations(arch: ArchSpec, plan: Plan) -> list[CacheDecl]:
    """Return the memory that every layer declares under a plan."""
    dtypes = plan.precision.cache_dtypes()
    return [layer.mixer.declare(dtypes) for layer in arch.layers]
