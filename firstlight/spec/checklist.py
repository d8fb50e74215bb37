"""What of a model can be reused, what must be modified, what is new: one item per part.

reuse   every operator of the part has a body besides the reference that accepts it, in every stage
modify  an operator exists, but in some stage only the reference accepts this shape or noun
new     an operator is not in the table
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from firstlight.spec.arch import ArchSpec
from firstlight.spec.bind import BindContext
from firstlight.spec.cost import contexts, cost
from firstlight.spec.parts import Part, parts, where

Status = Literal["reuse", "modify", "new"]

REFERENCE = "ref"
STAGES = ("prefill", "decode")


class Body(Protocol):
    """An implementation of an operator: a name, and why it cannot run in a place (None: it can)."""

    @property
    def name(self) -> str: ...

    @property
    def rejects(self) -> Callable[[Any], str | None]: ...


class Entry(Protocol):
    """An operator: its bodies, best first."""

    @property
    def impls(self) -> Sequence[Body]: ...


class Table(Protocol):
    """Operators by name."""

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> Entry: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One part of a model and what it takes to run it. bodies: "operator/body", best that fits.

    flops_share: at the shortest context of cost.contexts.
    """

    part: str
    where: str
    operators: tuple[str, ...]
    status: Status
    reason: str
    missing: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()
    flops_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """Items in the order of the forward pass."""

    model_type: str
    device: str
    dtype: str
    items: tuple[Item, ...]

    def count(self, status: Status) -> int:
        """Return how many items have a status."""
        return sum(item.status == status for item in self.items)

    def changes(self, newer: Checklist) -> tuple[str, ...]:
        """Return one line per part that appeared, went, or changed status, place or reason."""
        before, after = ({item.part: item for item in one.items} for one in (self, newer))
        lines = [f"- {part}: {item.status}" for part, item in before.items() if part not in after]
        for part, item in after.items():
            old = before.get(part)
            if old is None:
                lines.append(f"+ {part}: {item.status}, {item.where}: {item.reason}")
            elif (old.status, old.where, old.reason) != (item.status, item.where, item.reason):
                lines.append(f"~ {part}: {old.status} -> {item.status}, {item.where}: {item.reason}")
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        wide = [max([len(text) for text in column], default=0) for column in zip(*map(_cells, self.items), strict=True)]
        rows = [
            "  ".join(text.ljust(n) for text, n in zip(_cells(item), wide, strict=True)) + f"  {item.reason}"
            for item in self.items
        ]
        counts = ", ".join(f"{self.count(status)} {status}" for status in ("reuse", "modify", "new"))
        return "\n".join([f"{self.model_type} on {self.device}, {self.dtype}: {counts}", *rows])


def _cells(item: Item) -> tuple[str, ...]:
    return item.status, item.part, item.where, f"{item.flops_share:.1%}"


def checklist(arch: ArchSpec, table: Table, *, device: str = "cpu", dtype: str | None = None) -> Checklist:
    """Return what can be reused of an operator table. dtype None: that of the config."""
    dtype = dtype or arch.dtype
    costs = cost(arch, context=contexts(arch)[0])
    items = tuple(
        _item(part, table, device, dtype, where(part.places, len(arch.layers)), costs.flops_share(part.label))
        for part in parts(arch)
    )
    return Checklist(model_type=arch.model_type, device=device, dtype=dtype, items=items)


def missing_operators(arch: ArchSpec, table: Table) -> tuple[str, ...]:
    """Return the operators that the table lacks, in order of first use."""
    inner = (name for index in range(len(arch.layers)) for name in arch.layer_operators(index))
    return tuple(dict.fromkeys(name for name in (*arch.operators(), *inner) if name not in table))


def _item(part: Part, table: Table, device: str, dtype: str, place: str, share: float) -> Item:
    missing = tuple(name for name in part.operators if name not in table)
    bodies: list[str] = []
    refusals: list[str] = []
    for name in part.operators:
        if name in missing:
            continue
        used = {
            stage: _usable(table[name], BindContext(stage=stage, dtype=dtype, device=device, noun=part.noun))
            for stage in STAGES
        }
        refusals += dict.fromkeys(f"{name}: {text}" for body, text in used.values() if body is None)
        bodies += dict.fromkeys(f"{name}/{body}" for body, _ in used.values() if body is not None)
    status: Status = "new" if missing else "modify" if refusals else "reuse"
    lacks = [f"no operator {name}" for name in missing]
    return Item(
        part=part.label,
        where=place,
        operators=part.operators,
        status=status,
        reason="; ".join(lacks + refusals) or f"has {', '.join(bodies)}",
        missing=missing,
        bodies=tuple(bodies),
        flops_share=round(share, 4),
    )


def _usable(entry: Entry, site: BindContext) -> tuple[str | None, str]:
    """Return (best body besides the reference that accepts the site, None if all refuse; why they refuse)."""
    reasons = []
    for body in entry.impls:
        if body.name == REFERENCE:
            continue
        refusal = body.rejects(site)
        if refusal is None:
            return body.name, ""
        reasons.append(f"{body.name} in {site.stage}: {refusal}")
    return None, " | ".join(reasons) or "only the reference exists"
