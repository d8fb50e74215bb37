"""What a checkpoint gives to a model and what it does not, before a byte of it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

from torch import Tensor

from firstlight.errors import FirstlightError, closest
from firstlight.layers.parameter import Target
from firstlight.spec.names import Candidate
from firstlight.weights.checkpoint import DTYPES
from firstlight.weights.shards import SHOWN

HEAD = "head.weight"
EMBED = "embed.weight"

# the text of a later line of an error starts below that of the first
_BREAK = "\n" + " " * 8
_Fault = TypeVar("_Fault")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A part of a parameter and the checkpoint tensor, or part of one, that fills it."""

    target: Target
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that no tensor fills. name: ours; spellings: the checkpoint names looked for; shape: what is needed."""

    name: str
    spellings: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A checkpoint tensor whose shape differs from what the model needs."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]


def below(name: str, prefix: str) -> bool:
    """Return whether a dotted name is prefix or lies below it; all lie below the empty one."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How a checkpoint fills a model.

    unexpected: tensors neither used nor skipped. skipped: tensor -> reason. unsupported: tensors
    that are used or unexpected, with a format that cannot be read. tied: the head that is skipped
    because the model has none, and the embedding that stands in for it.
    """

    entries: tuple[Entry, ...]
    missing: tuple[Missing, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    unsupported: tuple[tuple[str, str], ...] = ()
    tied: tuple[str, str] | None = None

    def sources(self, prefix: str) -> set[str]:
        """Return the checkpoint tensors that fill anything below a module path."""
        return {
            entry.candidate.name
            for entry in self.entries
            if below(entry.target.name, prefix) or below(entry.target.path, prefix)
        }

    @property
    def bad(self) -> bool:
        """True if a tensor is missing, left over, misshapen or unreadable."""
        return bool(self.unsupported or self.missing or self.unexpected or self.mismatched)

    def loadable(self) -> LoadPlan:
        """Return the plan of those parameters that readable tensors fill whole, without the faults."""
        unreadable = {name for name, _ in self.unsupported}
        entries = [entry for entry in self.entries if entry.candidate.name not in unreadable]
        filled: dict[tuple[str, str], int] = {}
        for entry in entries:
            key = (entry.target.path, entry.target.attribute)
            filled[key] = filled.get(key, 0) + prod(entry.target.shape)
        whole = [e for e in entries if filled[e.target.path, e.target.attribute] == _numel(e.target)]
        return LoadPlan(entries=tuple(whole), skipped=self.skipped, tied=self.tied)

    def raise_if_bad(self, where: str) -> None:
        """Raise FirstlightError if a tensor is missing, left over, misshapen or unreadable."""
        groups = {
            "unsupported format": _listed(self.unsupported, " is ".join),
            "missing": _listed(self.missing, self._describe),
            "unexpected": _listed(self.unexpected, str),
            "other shape": _listed(self.mismatched, _describe_shapes),
        }
        lines = [f"{label}: {text}" for label, texts in groups.items() for text in texts]
        if not lines:
            return
        counts = [len(faults) for faults in (self.unsupported, self.missing, self.unexpected, self.mismatched)]
        summary = ", ".join(f"{count} {label}" for label, count in zip(groups, counts, strict=True) if count)
        what = f"the tensors of the checkpoint do not fit the model: {summary}"
        raise FirstlightError(what, where=where, why=_BREAK.join(lines), fix=self._fix())

    def _describe(self, missing: Missing) -> str:
        if not missing.spellings:
            return f"{missing.name} (the name map has no rule for it)"
        near = _nearest(missing.spellings[0], self.unexpected)
        return missing.spellings[0] + (f" (nearest: {near})" if near else "")

    def _fix(self) -> str:
        fixes = []
        if self.unsupported:
            fixes.append(f"use a checkpoint stored as {', '.join(DTYPES)}")
        if any(missing.name == HEAD for missing in self.missing):
            fixes.append('if the embedding serves as the head, set "tie_word_embeddings": true in config.json')
        if self.unexpected or self.mismatched or any(missing.name != HEAD for missing in self.missing):
            fixes.append("check that config.json and the weights are of one model and revision")
        return _BREAK.join(fixes)


def _numel(target: Target) -> int:
    parameter: Tensor = getattr(target.module, target.attribute)
    return parameter.numel()


def _listed(faults: Sequence[_Fault], describe: Callable[[_Fault], str]) -> list[str]:
    more = len(faults) - SHOWN
    return [describe(fault) for fault in faults[:SHOWN]] + ([f"{more} more"] if more > 0 else [])


def _describe_shapes(mismatch: Mismatch) -> str:
    return f"{mismatch.name} is {list(mismatch.found)}, the model needs {list(mismatch.expected)}"


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the most similar choice with the same layer and expert numbers, or of any if there is none."""
    numbers = re.findall(r"\d+", name)
    same = [choice for choice in choices if re.findall(r"\d+", choice) == numbers]
    # comparing spellings is slow and a checkpoint may hold 100000 names
    return closest(name, (same or list(choices))[:2000])
