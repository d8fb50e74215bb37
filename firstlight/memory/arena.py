"""The tensors behind every declaration: one arena per role, each with its own page size.

P pages, E entries per page, S slots. Roles are the names of the CacheDecls; every layer that declares
a role gets its own plane, and a page or slot number means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from firstlight.layers.context import LayerCache
from firstlight.memory.pages import FreeList
from firstlight.ops.paged.cache import Paged, State
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken

if TYPE_CHECKING:
    from firstlight.memory.sequence import SequenceCache


@dataclass(slots=True)
class PageArena:
    """Pages of one role. planes: layer -> [P, E, *shape]; free: the page numbers not owned."""

    decl: PerToken
    planes: dict[int, Tensor]
    free: FreeList


@dataclass(slots=True)
class StateArena:
    """Slots of one role. planes: layer -> [S, *shape]."""

    decl: PerSequence
    planes: dict[int, Tensor]


class CachePool:
    """All arenas of a model.

    decls: one CacheDecl per layer. num_tokens: capacity of the page arenas, rounded up to pages;
    num_slots: sequences that can be live. Scratch page 0 and slot 0 come on top.
    """

    def __init__(self, decls: Sequence[CacheDecl], *, num_tokens: int, num_slots: int, device: str = "cpu") -> None:
        self.decls, self.device = tuple(decls), device
        self.pages: dict[str, PageArena] = {}
        self.states: dict[str, StateArena] = {}
        self.slots = FreeList(num_slots + 1)
        for layer, decl in enumerate(self.decls):
            for page in decl.pages:
                self._add_pages(layer, page, -(-num_tokens // page.page_tokens) * num_slots + 1)
            for state in decl.states:
                self._add_states(layer, state, num_slots + 1)

    def _add_pages(self, layer: int, decl: PerToken, num_pages: int) -> None:
        arena = self.pages.setdefault(decl.name, PageArena(decl, {}, FreeList(num_pages)))
        if arena.decl != decl:
            raise ValueError(f"layer {layer} declares pages {decl.name!r} differently from an earlier layer")
        shape = (num_pages, decl.entries_per_page, *decl.shape)
        arena.planes[layer] = torch.zeros(shape, dtype=getattr(torch, decl.dtype), device=self.device)

    def _add_states(self, layer: int, decl: PerSequence, num_slots: int) -> None:
        arena = self.states.setdefault(decl.name, StateArena(decl, {}))
        if arena.decl != decl:
            raise ValueError(f"layer {layer} declares state {decl.name!r} differently from an earlier layer")
        arena.planes[layer] = torch.zeros(
            (num_slots, *decl.shape), dtype=getattr(torch, decl.dtype), device=self.device
        )

    @property
    def bytes(self) -> int:
        """Bytes of all arenas, scratch included."""
        arenas: list[PageArena | StateArena] = [*self.pages.values(), *self.states.values()]
        return sum(plane.nbytes for arena in arenas for plane in arena.planes.values())

    def views(self, sequences: Sequence[SequenceCache]) -> tuple[LayerCache, ...]:
        """Return each layer's caches for the rows of a step, in row order."""
        tables = {role: self._table([sequence.pages[role] for sequence in sequences]) for role in self.pages}
        slots_R = torch.tensor([sequence.slot for sequence in sequences], dtype=torch.int64, device=self.device)
        caches = []
        for layer, decl in enumerate(self.decls):
            paged = {
                p.name: Paged(self.pages[p.name].planes[layer], tables[p.name], p.tokens_per_entry) for p in decl.pages
            }
            states = {s.name: State(self.states[s.name].planes[layer], slots_R) for s in decl.states}
            caches.append(LayerCache(paged, states))
        return tuple(caches)

    def _table(self, pages: list[list[int]]) -> Tensor:
        width = max((len(row) for row in pages), default=0)
        # short rows end in the scratch page
        padded = [row + [0] * (width - len(row)) for row in pages]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(pages), width)
