"""What is left to do on a port: a list that is empty exactly when the port is complete.

An item is a mark left in the file, a config key that nothing reads, a tensor without a place, a parameter without a
tensor, an operator that nobody has, or the first module that computes something else than the reference.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from firstlight.engine.assemble import Declared, declare
from firstlight.errors import FirstlightError
from firstlight.layers.decoder import Decoder
from firstlight.layers.parameter import targets
from firstlight.models.registry import guarded, require_file
from firstlight.port.text import TODO
from firstlight.spec.checklist import missing_operators
from firstlight.spec.read import text_config
from firstlight.verify.report import VerifyReport, innermost
from firstlight.verify.run import REFERENCES, VerifyOptions, verify
from firstlight.verify.summary import repro
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.faults import faults
from firstlight.weights.load import resolve

Kind = Literal["file", "todo", "config key", "operator", "tensor", "parameter", "shape", "cache", "divergence"]
NO_REFERENCE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing to do. where: a line of the file, layers, or a file; fix: what settles it."""

    kind: Kind
    what: str
    where: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """items: what is left. proof: the verification that was run, None if none could be; notices: why, and the like."""

    model: str
    port: str
    items: tuple[Item, ...]
    notices: tuple[str, ...] = ()
    proof: VerifyReport | None = None

    @property
    def complete(self) -> bool:
        """True if nothing is left."""
        return not self.items

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        proof = None if self.proof is None else self.proof.to_dict()
        items = [asdict(item) for item in self.items]
        return {"model": self.model, "port": self.port, "complete": self.complete, "items": items,
                "notices": list(self.notices), "proof": proof}  # fmt: skip


def status(
    model: str, file: Path, *, reference: str = "transformers", progress: Callable[[int], None] | None = None
) -> Status:
    """Return what is left to do on a port file for a model. reference: "none" compares nothing.

    Raises: FirstlightError if the model cannot be read; what is wrong with the port is an item.
    """
    if reference not in (*REFERENCES, NO_REFERENCE):
        choices = " or ".join((*REFERENCES, NO_REFERENCE))
        raise FirstlightError(f"unknown reference {reference!r}", where="--reference", why=f"it can be {choices}")
    require_file(file)
    marks = tuple(todos(file))
    try:
        declared = declare(model, port_file=file, allow_unknown_keys=True)
        declared.source.require_folder("a port's status, which compares it with the tensors,")
        with guarded("the declaration", str(file)):
            built = Decoder.build(declared.arch, torch.float32)
    except FirstlightError as error:
        if str(file) not in f"{error.where} {error.why}":
            raise
        item = Item(kind="file", what=error.what, where=error.where, fix=error.fix or error.why)
        return Status(model=model, port=str(file), items=(item, *marks))
    missing = missing_operators(declared.arch, declared.table)
    items = [*marks, *config_keys(declared), *(operator(name) for name in missing), *tensors(declared, built)]
    notices, proof = list(declared.port.notices), None
    if reference != NO_REFERENCE and not missing:
        proof, why = proven(declared, reference, progress)
        notices += [why] if why else []
        items += divergence(proof, model, file, reference, marked=bool(marks)) if proof else []
    return Status(model=model, port=str(file), items=tuple(items), notices=tuple(notices), proof=proof)


def todos(file: Path) -> Iterator[Item]:
    """Yield the marks left in a file, continued comment lines joined."""
    try:
        text = file.read_text(encoding="utf-8")
        comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    except (OSError, UnicodeDecodeError, SyntaxError, tokenize.TokenError):
        # loading the file says what is wrong with it
        return
    by_line = {token.start[0]: token.string for token in comments}
    for line, comment in by_line.items():
        if not comment.startswith(TODO):
            continue
        said = [comment.removeprefix(TODO)]
        while by_line.get(line + len(said), "").startswith("#   "):
            said.append(by_line[line + len(said)].removeprefix("#").strip())
        yield Item(kind="todo", what=" ".join(said), where=f"{file}:{line}", fix="settle it and remove the mark")


def config_keys(declared: Declared) -> Iterator[Item]:
    """Yield the keys of config.json that the port does not read."""
    raw = text_config(declared.source.raw)
    for key in declared.unknown_keys:
        table, _, leaf = key.rpartition(".")
        shown = str((raw[table] if table else raw).get(leaf))
        yield Item(
            kind="config key",
            what=f"{key} = {shown if len(shown) <= 60 else shown[:57] + '...'} is not read",
            where=declared.source.where,
            fix=f'read it, or cfg.expect("{key}", ...), or cfg.ignore("{key}") with the reason beside it',
        )


def operator(name: str) -> Item:
    """Return the item of an operator that is not there."""
    fix = "register it in the port file with its reference: def register(table): ..."
    return Item(kind="operator", what=f"no operator {name}", fix=fix)


def tensors(declared: Declared, built: Decoder) -> Iterator[Item]:
    """Yield what of the checkpoint has no place and what of the model has no tensor, one item per name pattern."""
    folder = declared.source.require_folder("a port's status")
    with Checkpoint.open(folder) as checkpoint:
        names = declared.port.names.at(len(declared.arch.layers))
        for fault in faults(resolve(targets(built), names, checkpoint), checkpoint, names):
            yield Item(kind=fault.kind, what=fault.what, where=fault.where, fix=fault.fix)


def proven(
    declared: Declared, reference: str, progress: Callable[[int], None] | None
) -> tuple[VerifyReport | None, str]:
    """Return the verification against a reference, or why there is none."""
    try:
        found = verify(declared, declared.plan(), VerifyOptions(reference=reference), progress)
    except FirstlightError as error:
        return None, f"nothing was compared: {error.what}" + (f" ({error.why})" if error.why else "")
    return found, "" if found.independent else f"{found.reference} runs the same declaration: the port stays unproven"


def divergence(proof: VerifyReport, model: str, file: Path, reference: str, *, marked: bool) -> Iterator[Item]:
    """Yield caches that nothing uses and the first module that differs; faults of tensors are items of their own.

    What cannot run while marks are left is no news.
    """
    failed = [check for check in proof.checks if not check.passed]
    for check in failed:
        if check.kind == "caches":
            yield Item(kind="cache", what=f"{check.place}: {check.note}", fix=check.hint)
    first = innermost(failed)
    if first is None or (marked and "cannot run" in first.note):
        return
    told = f"relative error {first.relative:.1e} where {first.tolerance:.0e} is allowed"
    hint = "; ".join(text for text in (first.hint, first.note) if text)
    again = repro(proof, first, model=model, reference=reference, flags=("--port", str(file)))
    yield Item(kind="divergence", what=f"{first.place}: {told}", where=hint, fix=again)
