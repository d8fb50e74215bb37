"""What a layer is given for one step: the bodies its Plan chose, the rows, and its own caches.

Nothing here is global; two steps with different plans can run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.rows import Rows

Body = Callable[..., Any]


class Ops:
    """The operator bodies of one layer and stage, called by operator name: `ops.rope(...)`."""

    __slots__ = ("bodies",)

    def __init__(self, bodies: Mapping[str, Body]) -> None:
        self.bodies = dict(bodies)

    def __getattr__(self, name: str) -> Body:
        try:
            return self.bodies[name]
        except KeyError:
            raise AttributeError(
                f"the plan binds no operator {name!r} here; it binds {', '.join(sorted(self.bodies))}"
            ) from None


@dataclass(slots=True)
class Scratch:
    """What layers hand to later layers of the same forward. selection_TK: the last index selection."""

    selection_TK: Tensor | None = None


class Named(dict[str, Any]):
    """Memory by name. Raises: KeyError in words for a name that declare() lacks."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"no {name!r} is declared here; declare() keeps {', '.join(self) or 'nothing'}")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's memory, by the names of its CacheDecl."""

    pages: Mapping[str, Paged] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """One layer's view of a step."""

    ops: Ops
    rows: Rows
    cache: LayerCache
    scratch: Scratch


@dataclass(frozen=True, slots=True)
class StepContext:
    """A whole step: rows, per-layer bodies and caches, and the bodies used outside the layers."""

    rows: Rows
    model_ops: Ops
    layer_ops: tuple[Ops, ...]
    caches: tuple[LayerCache, ...]
    scratch: Scratch = field(default_factory=Scratch)

    def layer(self, index: int) -> LayerContext:
        """Return the view of one layer."""
        return LayerContext(self.layer_ops[index], self.rows, self.caches[index], self.scratch)
