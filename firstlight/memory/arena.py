"""The tensors behind every declaration: one arena per role, each with its own page size.

P pages, E entries per page, S slots. Roles are the names of the CacheDecls; every layer that declares
a role gets its own plane, and a page or slot number means the same in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.layers.context import LayerCache, Named
from firstlight.memory.blocks import Blocks
from firstlight.memory.sequence import Hold, SequenceCache
from firstlight.ops.paged.cache import Paged, State
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken


@dataclass(slots=True)
class Arena:
    """Storage of one role. planes: layer -> [P, E, *shape] for pages, [S, *shape] for states."""

    decl: PerToken | PerSequence
    planes: dict[int, Tensor]


class CachePool:
    """All arenas of a model, and the Blocks that say who holds what.

    decls: one CacheDecl per layer. num_tokens: capacity of the page arenas, rounded up to pages; num_slots: live
    sequences and state checkpoints together. Scratch page 0 and slot 0 come on top.
    poison: fill what is given back with NaN, so that a read of it shows; for tests.
    """

    def __init__(
        self,
        decls: Sequence[CacheDecl],
        *,
        num_tokens: int,
        num_slots: int,
        device: str = "cpu",
        poison: bool = False,
    ) -> None:
        self.decls, self.device = tuple(decls), device
        self.blocks = Blocks(self.decls, num_tokens=num_tokens, num_slots=num_slots)
        self.pages: dict[str, Arena] = {}
        self.states: dict[str, Arena] = {}
        for layer, decl in enumerate(self.decls):
            for page in decl.pages:
                shape = (self.blocks.roles[page.name].pool.total, page.entries_per_page, *page.shape)
                self._add(self.pages, layer, page, shape)
            for state in decl.states:
                self._add(self.states, layer, state, (num_slots + 1, *state.shape))
        if poison:
            self._poison()

    def _add(self, arenas: dict[str, Arena], layer: int, decl: PerToken | PerSequence, shape: tuple[int, ...]) -> None:
        arena = arenas.setdefault(decl.name, Arena(decl, {}))
        if arena.decl != decl:
            raise ValueError(f"layer {layer} declares {decl.name!r} differently from an earlier layer")
        arena.planes[layer] = torch.zeros(shape, dtype=getattr(torch, decl.dtype), device=self.device)

    def _poison(self) -> None:
        for name, role in self.blocks.roles.items():
            role.pool.on_drop = poisoner([self.pages[name]])
        self.blocks.slots.on_drop = poisoner(list(self.states.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all arenas, scratch included."""
        arenas = [*self.pages.values(), *self.states.values()]
        return sum(plane.nbytes for arena in arenas for plane in arena.planes.values())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one state slot, over all roles and layers."""
        return sum(plane[0].nbytes for arena in self.states.values() for plane in arena.planes.values())

    def copy_state(self, source: int, target: int) -> None:
        """Copy every state of a slot to another slot."""
        for arena in self.states.values():
            for plane in arena.planes.values():
                plane[target] = plane[source]

    def views(self, holds: Sequence[Hold]) -> tuple[LayerCache, ...]:
        """Return each layer's caches for the rows of a step, in row order."""
        tables = {role: self._table(role, holds) for role in self.pages}
        slots_R = torch.tensor([hold.slot for hold in holds], dtype=torch.int64, device=self.device)
        caches = []
        for layer, decl in enumerate(self.decls):
            paged = {
                p.name: Paged(self.pages[p.name].planes[layer], tables[p.name], p.tokens_per_entry) for p in decl.pages
            }
            states = {s.name: State(self.states[s.name].planes[layer], slots_R) for s in decl.states}
            caches.append(LayerCache(Named(paged), Named(states)))
        return tuple(caches)

    def _table(self, role: str, holds: Sequence[Hold]) -> Tensor:
        counts = [self.blocks.pages_for(role, hold.num_tokens) for hold in holds]
        width = max(counts, default=0)
        # short rows end in the scratch page
        padded = [h.pages[role][:n] + [0] * (width - n) for h, n in zip(holds, counts, strict=True)]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(holds), width)

    def check_ledger(self, sequences: Sequence[SequenceCache], held_slots: Sequence[int] = ()) -> None:
        """Check that what the sequences (and held_slots) hold is what is held, and nothing is lost.

        Raises: AssertionError.
        """
        for name, role in self.blocks.roles.items():
            role.pool.check(Counter(page for sequence in sequences for page in sequence.pages[name]))
        self.blocks.slots.check(Counter([*(s.slot for s in sequences), *held_slots]))


def poisoner(arenas: list[Arena]) -> Callable[[list[int]], None]:
    """Return a function that fills numbers of these arenas with NaN where the format has one."""

    def fill(numbers: list[int]) -> None:
        for plane in (plane for arena in arenas for plane in arena.planes.values()):
            if plane.is_floating_point():
                plane[numbers] = float("nan")

    return fill
