"""inspect: what a model is made of, from its config.json alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from firstlight.cli.flags import ModelFlags, OutputFlags, check_dtype
from firstlight.cli.output import BAD, GOOD, WAIT, Output
from firstlight.errors import EXIT_MISSING_OPERATORS, EXIT_OK, FirstlightError

if TYPE_CHECKING:
    from firstlight.ops.registry import OperatorTable
    from firstlight.spec.arch import ArchSpec
    from firstlight.spec.checklist import Checklist
    from firstlight.spec.cost import Cost
    from firstlight.spec.evidence import Evidence
    from firstlight.weights.source import ModelSource

STYLES = {"reuse": GOOD, "modify": WAIT, "new": BAD}


def inspect(model: ModelFlags, output: OutputFlags) -> int:
    """What a model is made of: layers, sizes, operator checklist. Its config.json is enough."""
    from firstlight.models.declare import read_arch
    from firstlight.models.registry import find_port
    from firstlight.weights.source import locate

    out = Output(output)
    source = locate(model.model, config_only=True)
    out.model(model.model)
    try:
        port = find_port(source.model_type, port_file=model.port, where=source.where)
    except FirstlightError as error:
        if error.exit_code != EXIT_MISSING_OPERATORS:
            raise
        return show_evidence(out, source, error)
    arch, unknown = read_arch(source.raw, port, where=source.where, allow_unknown_keys=model.allow_unknown_keys)
    check_dtype(arch.dtype, where=source.where)
    out.notices(port.notices)
    return show_model(out, Subject(source.name, port.origin, arch, unknown), port.operators())


@dataclass(frozen=True, slots=True)
class Subject:
    """What is shown. Its parts are read without torch, which takes seconds to import."""

    name: str
    origin: str
    arch: ArchSpec
    unknown_keys: tuple[str, ...]


def show_evidence(out: Output, source: ModelSource, error: FirstlightError) -> int:
    """Print what the names of an unknown model betray, and why it cannot run."""
    from firstlight.models.known import known_ports
    from firstlight.ops.registry import operator_table
    from firstlight.spec.evidence import recognise

    known, names = known_ports(), operator_table().names()
    evidence = recognise(source.raw, tensor_names(source), known=known, operators=names)
    drafted = draft_of(source)
    if out.flags.json:
        out.json({"model": source.name, "known": False, "evidence": evidence.to_dict(), "draft": drafted})
    else:
        print_evidence(out, evidence)
        print_draft(out, drafted)
    raise error


def draft_of(source: ModelSource) -> dict[str, Any] | None:
    """Return what a drafted port would be made of, None without tensors."""
    if not tensor_names(source):
        return None
    from firstlight.port.draft import draft
    from firstlight.port.report import origins
    from firstlight.spec.cost import contexts

    made = draft(source)
    layers = [{"pattern": pattern, "layers": where} for pattern, where in made.patterns()]
    found = {"layers": layers, "parts": [], "guesses": made.guesses(), "unread_keys": list(made.unread)}
    found |= {"why": made.why, "context": 0}
    if made.arch is None or made.port is None:
        return found
    declared = made.declared(source)
    parts = [asdict(part) for part in origins(declared, declared.plan())]
    return found | {"parts": parts, "context": contexts(made.arch)[0]}


def print_draft(out: Output, drafted: dict[str, Any] | None) -> None:
    """Print what of a drafted port exists and what is new."""
    if drafted is None:
        out.line("drafted: nothing, since only names of config.json were given; a folder with tensors says more")
        return
    from firstlight.plan.amounts import tokens

    out.line()
    if drafted["why"]:
        out.line(f"drafted: nothing yet, {drafted['why']}", BAD)
        return
    out.line("drafted from config, tensors and the class in transformers where there is one")
    out.table([(f"layers {layer['layers']}", layer["pattern"]) for layer in drafted["layers"]])
    for guess in drafted["guesses"]:
        out.line(f"  guess  {guess}")
    counts = ", ".join(f"{sum(p['origin'] == o for p in drafted['parts'])} {o}" for o in STYLES)
    out.line()
    out.line(f"checklist: {counts}")
    rows = [
        ((p["origin"], STYLES[p["origin"]]), p["part"], p["where"], f"{p['flops_share']:.1%}", p["reason"])
        for p in drafted["parts"]
    ]
    out.table(rows, header=("", "part", "where", f"FLOPs {tokens(drafted['context'])}", "operators"), right=(3,))


def tensor_names(source: ModelSource) -> list[str]:
    """Return the names in the checkpoint, if there is one."""
    if source.folder is None or not any(source.folder.glob("*.safetensors")):
        return []
    from firstlight.weights.checkpoint import Checkpoint

    with Checkpoint.open(source.folder) as checkpoint:
        return checkpoint.names()


def print_evidence(out: Output, evidence: Evidence) -> None:
    """Print the parts recognised, the nearest port, and what nobody here knows."""
    for line in str(evidence).splitlines():
        out.line(line)


def show_model(out: Output, subject: Subject, table: OperatorTable) -> int:
    """Print one screen, or the same as JSON."""
    from firstlight.spec.checklist import checklist
    from firstlight.spec.cost import contexts, cost

    arch = subject.arch
    # where an operator is missing the checklist says so, and so does the exit code
    parts = checklist(arch, table)
    costs = [cost(arch, context=context) for context in contexts(arch)]
    if out.flags.json:
        out.json(document(subject, parts, costs))
    else:
        print_model(out, subject, costs)
        print_checklist(out, parts, costs[0].context)
    return EXIT_MISSING_OPERATORS if parts.count("new") else EXIT_OK


def document(subject: Subject, parts: Checklist, costs: list[Cost]) -> dict[str, Any]:
    """Return everything on the screen, and the declaration, as JSON-ready data."""
    from firstlight.spec.parts import fold_layers

    return {
        "model": subject.name,
        "known": True,
        "model_type": subject.arch.model_type,
        "port": subject.origin,
        "unknown_keys": list(subject.unknown_keys),
        "layers": [{"pattern": pattern, "layers": list(layers)} for pattern, layers in fold_layers(subject.arch)],
        "cost": {f"{one.context}": one.to_dict() for one in costs},
        "checklist": parts.to_dict(),
        "arch": subject.arch.to_dict(),
    }


def print_model(out: Output, subject: Subject, costs: list[Cost]) -> None:
    """Print sizes and folded layers."""
    from firstlight.plan.amounts import amount, quantity, tokens
    from firstlight.spec.parts import fold_layers, where

    arch, total = subject.arch, costs[0].total
    count = {"thousand": "K", "billion": "B"}
    flops = ", ".join(f"{quantity(one.total.flops_per_token, 'FLOP')} at {tokens(one.context)}" for one in costs)
    active = f"{amount(total.active_parameters, **count)} active per token"
    rows = [
        ("type", f"{arch.model_type}, declared by {subject.origin}"),
        ("parameters", f"{amount(total.parameters, **count)} ({total.parameters:,}), {active}"),
        ("weights", f"{quantity(total.weight_bytes, 'B')} in {costs[0].dtype}"),
        ("cache", f"{quantity(total.cache_bytes_per_token, 'B')} per token"),
        ("state", f"{quantity(total.state_bytes_per_sequence, 'B')} per sequence"),
        ("compute", f"{flops}, per token"),
        (
            "context",
            f"{arch.max_position_embeddings:,} tokens, vocabulary {arch.vocab_size:,}, width {arch.hidden_size}",
        ),
    ]
    rows += [("unread", f"keys let pass: {', '.join(subject.unknown_keys)}")] if subject.unknown_keys else []
    rows += [("extra", f"{arch.mtp_layers} multi-token-prediction layers, not run")] if arch.mtp_layers else []
    out.table(rows)
    out.line()
    out.table([(where(layers, len(arch.layers)), pattern) for pattern, layers in fold_layers(arch)])


def print_checklist(out: Output, parts: Checklist, context: int) -> None:
    """Print the operator checklist. context: at which the FLOPs were shared out."""
    from firstlight.plan.amounts import tokens

    out.line()
    counts = ", ".join(f"{parts.count(status)} {status}" for status in ("reuse", "modify", "new"))
    out.line(f"checklist on {parts.device}, {parts.dtype}: {counts}")
    rows = [
        ((item.status, STYLES[item.status]), item.part, item.where, f"{item.flops_share:.1%}", item.reason)
        for item in parts.items
    ]
    out.table(rows, header=("", "part", "where", f"FLOPs {tokens(context)}", "operators"), right=(3,))
