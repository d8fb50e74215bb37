"""Which single fact of a declaration, said otherwise, makes a module equal to its reference.

A wrong word in a declaration - a rotary layout, the form of a decay, an activation - leaves all weights where they are.
So the words that the nouns know, and the numbers of config.json, are tried in turn on the reference's own input; what
then agrees names the cause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from firstlight.layers.decoder import DecoderLayer, default_dtype
from firstlight.spec.arch import ArchSpec, Layer, Residual
from firstlight.spec.noun import NewNoun
from firstlight.verify.compare import LayerComparison
from firstlight.verify.report import Check, innermost

# usual numbers, by the end of a field's name; a flag or a word needs no table
USUAL: dict[str, tuple[float | None, ...]] = {
    "eps": (1e-6, 1e-5, 1e-8, 1e-12),
    "theta": (1e4, 1e5, 5e5, 1e6, 1e7),
    "scale": (1.0,),
    "lower_bound": (None, -5.0),
    "limit": (None, 7.0, 10.0),
}
# for one module; a layer of a large model takes a second a time
SECONDS = 20.0
# two errors this many times apart are both rounding
NEAR = 4
Number = int | float


@dataclass(frozen=True, slots=True)
class Fact:
    """A field said otherwise. changed: the noun that then holds. key: of config.json, where the number stands."""

    path: str
    before: Any
    after: Any
    changed: Any
    key: str = ""

    def __str__(self) -> str:
        stands = f", {self.key} of config.json" if self.key else ""
        return f"{self.path} = {self.after!r}{stands} (the port says {self.before!r})"


class WhatIf:
    """Tries the facts of an architecture's layers, each kind of layer and module once. raw: the config.json."""

    def __init__(self, arch: ArchSpec, raw: Mapping[str, Any]) -> None:
        self.arch = arch
        self.numbers = dict(numbers_of(raw))
        self.seen: set[tuple[Layer, str]] = set()

    def explained(self, comparison: LayerComparison, checks: Sequence[Check]) -> list[Check]:
        """Return the checks of a layer, the innermost failed one with the fact that explains it, if one does."""
        failed = innermost([check for check in checks if not check.passed])
        layer = self.arch.layers[comparison.index]
        if failed is None or failed.kind == "state" or (layer, failed.module) in self.seen:
            return list(checks)
        self.seen.add((layer, failed.module))
        found = self._facts_that_fit(comparison, failed.module)
        hint = f"equal with {' or with '.join(found)}" if found else failed.hint
        return [replace(check, hint=hint) if check is failed else check for check in checks]

    def _facts_that_fit(self, comparison: LayerComparison, module: str) -> list[str]:
        bound = comparison.context().ops.bodies.keys()
        fits: dict[str, list[tuple[float, str]]] = {}
        began = time.perf_counter()
        for fact, layer, residual in self._otherwise(comparison.index):
            if time.perf_counter() - began > SECONDS:
                break
            # the plan binds what the declaration calls
            bindable = {*layer.operators(), *residual.operators} <= bound
            other = rebuilt(comparison.layer, self.arch.hidden_size, layer, residual) if bindable else None
            if other is None:
                continue
            index, trace = comparison.index, comparison.trace
            checks = LayerComparison(index, other, trace, comparison.context, comparison.tolerance).run(only=module)
            if checks and all(check.passed for check in checks):
                fits.setdefault(fact.path, []).append((max(check.relative for check in checks), str(fact)))
        # of several numbers for one field the first that is about as near as any
        return [next(told for error, told in found if error <= NEAR * min(found)[0]) for found in fits.values()]

    def _otherwise(self, index: int) -> Iterator[tuple[Fact, Layer, Residual]]:
        """Yield a fact, with the layer and the residual that it leads to; words and flags before numbers."""
        layer, residual = self.arch.layers[index], self.arch.residual
        for numbers in (None, self.numbers):
            for part in ("norm", "mixer", "ffn"):
                for fact in otherwise(getattr(layer, part), part, numbers):
                    yield fact, replace(layer, **{part: fact.changed}), residual
            for fact in otherwise(residual, "residual", numbers):
                yield fact, layer, fact.changed


def rebuilt(layer: nn.Module, hidden_size: int, spec: Layer, residual: Residual) -> DecoderLayer | None:
    """Return a layer of another spec with the same weights; None where it needs others."""
    with default_dtype(next(layer.parameters()).dtype):
        other = DecoderLayer(hidden_size, spec, residual)
    ours, theirs = (dict(module.named_parameters()) for module in (layer, other))
    if {name: p.shape for name, p in ours.items()} != {name: p.shape for name, p in theirs.items()}:
        return None
    for name, parameter in ours.items():
        path, _, attribute = name.rpartition(".")
        setattr(other.get_submodule(path), attribute, parameter)
    return other


def otherwise(noun: Any, path: str, numbers: Mapping[str, Number] | None) -> Iterator[Fact]:
    """Yield every fact of a noun and of those inside it. numbers: tried for numbers; None: words and flags only."""
    if not is_dataclass(noun) or isinstance(noun, (type, NewNoun)):
        return
    hints = get_type_hints(type(noun))
    for field in fields(noun):
        name, value = field.name, getattr(noun, field.name)
        tried = words(value, hints[name]) if numbers is None else other_numbers(name, value, hints[name], numbers)
        for after, key in tried.items():
            for changed in changes(noun, name, after):
                yield Fact(f"{path}.{name}", value, after, changed, key)
        for inner in otherwise(value, f"{path}.{name}", numbers):
            for changed in changes(noun, name, inner.changed):
                yield replace(inner, changed=changed)


def words(value: Any, hint: Any) -> dict[Any, str]:
    """Return the other words of a field, the opposite of a flag, None for a noun that may be left out."""
    kinds = [hint, *get_args(hint)]
    known = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    optional = is_dataclass(value) and type(None) in kinds
    found = known or ([not value] if isinstance(value, bool) else [None] if optional else [])
    return {word: "" for word in found if word != value}


def other_numbers(name: str, value: Any, hint: Any, numbers: Mapping[str, Number]) -> dict[Any, str]:
    """Return other numbers for a numeric field: the usual ones, and with their keys those of config.json.

    Those whose keys are spelt like the field come first. A scale may be the n ** -0.5 of a size.
    """
    kinds = {hint, *get_args(hint)}
    if isinstance(value, bool) or not kinds & {int, float}:
        return {}
    alike = sorted(numbers, key=lambda key: -SequenceMatcher(None, key.rpartition(".")[2], name).ratio())
    given = {key: numbers[key] for key in alike if float in kinds or isinstance(numbers[key], int)}
    usual = next((found for end, found in USUAL.items() if name.endswith(end)), ())
    found: dict[float | None, str] = dict.fromkeys(usual, "")
    found |= {number: key for key, number in reversed(given.items())}
    if name == "scaling":
        found |= {number**-0.5: f"{key} ** -0.5" for key, number in given.items() if number > 1}
    ranked = sorted(found.items(), key=lambda item: alike.index(item[1]) if item[1] in alike else -1)
    return {n: key for n, key in ranked if n != value and (n is not None or type(None) in kinds)}


def numbers_of(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Number]]:
    """Yield (key, number) of a config.json, keys of nested tables dotted."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{path}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{path}{key}", value


def changes(noun: Any, name: str, value: Any) -> Iterator[Any]:
    """Yield the noun with a field changed; where that needs a number beside it, with each usual one."""
    try:
        yield replace(noun, **{name: value})
    except (ValueError, ZeroDivisionError):
        for beside in (field.name for field in fields(noun) if field.name in USUAL and field.name != name):
            for number in USUAL[beside]:
                with suppress(ValueError):
                    yield replace(noun, **{name: value, beside: number})
