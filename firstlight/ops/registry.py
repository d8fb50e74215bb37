"""The operator table: name -> implementations ("bodies"), found late, chosen by the planner.

An operator has one truth, `ref`, and any number of other bodies. A body says where it is valid
through `rejects(ctx)`: None means usable, text says why not. Higher rank is preferred.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import FirstlightError, closest
from firstlight.spec.bind import BindContext


def always(ctx: BindContext) -> str | None:
    """Reject nothing."""
    return None


@dataclass(frozen=True, slots=True)
class Impl:
    """One body: its name, "module:attribute", where it is valid, and its rank."""

    name: str
    target: str
    rejects: Callable[[BindContext], str | None] = always
    rank: int = 0

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, attribute = self.target.split(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A named operator with its bodies, best rank first."""

    name: str
    summary: str
    impls: tuple[Impl, ...]

    def impl(self, name: str) -> Impl:
        """Return a body by name. Raises: FirstlightError naming the choices."""
        for impl in self.impls:
            if impl.name == name:
                return impl
        choices = [impl.name for impl in self.impls]
        near = closest(name, choices)
        raise FirstlightError(
            f"operator {self.name} has no implementation {name!r}",
            why=f"it has: {', '.join(choices)}",
            fix=f"--op {self.name}={near or choices[0]}",
        )


@dataclass(slots=True)
class OperatorTable:
    """Operators by name. The package's table comes from `operator_table()`; a port may add to a copy."""

    operators: dict[str, Operator] = field(default_factory=dict)

    def register(self, name: str, summary: str, *impls: Impl) -> None:
        """Add an operator, or further bodies to one that exists."""
        known = self.operators.get(name)
        merged = {impl.name: impl for impl in (known.impls if known else ())} | {impl.name: impl for impl in impls}
        if "ref" not in merged:
            raise ValueError(f"operator {name} has no ref body: the reference lands first")
        ordered = tuple(sorted(merged.values(), key=lambda impl: -impl.rank))
        self.operators[name] = Operator(name=name, summary=summary or (known.summary if known else ""), impls=ordered)

    def __contains__(self, name: str) -> bool:
        return name in self.operators

    def __getitem__(self, name: str) -> Operator:
        if name not in self.operators:
            near = closest(name, list(self.operators))
            raise FirstlightError(
                f"unknown operator {name!r}",
                why=f"known: {', '.join(sorted(self.operators))}",
                fix=f"did you mean {near}?" if near else "firstlight ops",
            )
        return self.operators[name]

    def names(self) -> list[str]:
        """Return the operator names, sorted."""
        return sorted(self.operators)


def operator_table() -> OperatorTable:
    """Return a fresh table with every operator of `firstlight.ops`; imports no torch."""
    import firstlight.ops as package

    table = OperatorTable()
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            importlib.import_module(f"firstlight.ops.{module.name}").register(table)
    return table
