"""Numbered resources and who holds them: pages of a role, or state slots. Pure bookkeeping, no tensors.

A number is free, held (by one or more holders), or cached: held by nobody, but its content is published
under a key and can be found again until somebody needs the number. Number 0 is scratch and belongs to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import lcm

from firstlight.spec.caches import PAGE_TOKENS, CacheDecl


class BlockPool:
    """Numbers 1 .. total - 1 with holders and an index of published content.

    on_drop: called with numbers whose content is gone (freed, or evicted to be handed out again).
    """

    def __init__(self, total: int, on_drop: Callable[[list[int]], None] | None = None) -> None:
        if total < 1:
            raise ValueError(f"a pool holds the scratch entry at least, got total={total}")
        self.total = total
        self.on_drop = on_drop
        self.evictions = 0
        self._free = list(range(total - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, Hashable] = {}
        self._number_of: dict[Hashable, int] = {}

    @property
    def num_available(self) -> int:
        """Numbers that can be handed out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Numbers held by nobody whose content can be found."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Numbers with a holder."""
        return len(self._holders)

    def holders(self) -> Mapping[int, int]:
        """Return number -> count of holders."""
        return dict(self._holders)

    def can_allocate(self, count: int) -> bool:
        """True if allocate(count) would succeed."""
        return count <= self.num_available

    def allocate(self, count: int) -> list[int]:
        """Return count numbers with one holder each: free ones first, then the least recently used of the cached.

        Raises: MemoryError if there are not enough; nothing changes then.
        """
        if not self.can_allocate(count):
            raise MemoryError(f"{count} asked, {self.num_available} of {self.total - 1} available")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, number: int) -> None:
        """Add a holder to a number that is held or cached."""
        self._cached.pop(number, None)
        self._holders[number] = self._holders.get(number, 0) + 1

    def release(self, numbers: Iterable[int]) -> None:
        """Take one holder off each number. Raises: ValueError for one that has none."""
        dropped = []
        for number in numbers:
            count = self._holders.get(number, 0)
            if not count:
                raise ValueError(f"number {number} has no holder")
            if count > 1:
                self._holders[number] = count - 1
                continue
            del self._holders[number]
            if number in self._key_of:
                self._cached[number] = None
            else:
                self._free.append(number)
                dropped.append(number)
        self._drop(dropped)

    def publish(self, number: int, key: Hashable) -> bool:
        """Make a held number's content findable under key; False if the key or the number has an entry already."""
        if key in self._number_of or number in self._key_of:
            return False
        self._key_of[number], self._number_of[key] = key, number
        return True

    def find(self, key: Hashable) -> int | None:
        """Return the number whose content is published under key."""
        return self._number_of.get(key)

    def clear_cache(self) -> None:
        """Forget all published content; what nobody holds becomes free."""
        numbers = list(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._number_of.clear()
        self._free += numbers
        self._drop(numbers)

    def _evict(self) -> int:
        number, _ = self._cached.popitem(last=False)
        del self._number_of[self._key_of.pop(number)]
        self.evictions += 1
        self._drop([number])
        return number

    def _drop(self, numbers: list[int]) -> None:
        if numbers and self.on_drop is not None:
            self.on_drop(numbers)

    def check(self, expected: Mapping[int, int]) -> None:
        """Check that exactly these numbers are held, by that many, and that none is lost. Raises: AssertionError."""
        assert self._holders == dict(expected), f"held {self._holders}, expected {dict(expected)}"
        assert len(self._free) + len(self._cached) + len(self._holders) == self.total - 1, "a number is lost"
        everything = {*self._free, *self._cached, *self._holders}
        assert everything == set(range(1, self.total)), "a number is in two places, or 0 is handed out"


@dataclass(frozen=True, slots=True)
class Role:
    """Pages of one name: their pool, and tokens per page."""

    pool: BlockPool
    page_tokens: int


class Blocks:
    """All page roles and the state slots of a model.

    unit_tokens: prefixes are shared in multiples of it; the least common multiple of the page sizes, of the
    mixers' checkpoint grids, and of 64. has_states: whether a prefix also needs a state checkpoint.
    """

    def __init__(self, decls: Iterable[CacheDecl], *, num_tokens: int, num_slots: int) -> None:
        pages = {page.name: page for decl in decls for page in decl.pages}
        grids = [decl.grid for decl in decls]
        self.roles: dict[str, Role] = {}
        for name, page in pages.items():
            count = -(-num_tokens // page.page_tokens) + 1
            self.roles[name] = Role(BlockPool(count), page.page_tokens)
        self.slots = BlockPool(num_slots + 1)
        self.unit_tokens = lcm(PAGE_TOKENS, *grids, *(role.page_tokens for role in self.roles.values()))
        self.has_states = any(state.checkpoint == "copy" for decl in decls for state in decl.states)

    def pages_for(self, role: str, num_tokens: int) -> int:
        """Return how many pages of a role hold num_tokens."""
        return -(-num_tokens // self.roles[role].page_tokens)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """True if one sequence of that length fits when it is alone."""
        return all(self.pages_for(name, num_tokens) < role.pool.total for name, role in self.roles.items())

    def most_tokens(self) -> int | None:
        """Return the length of the longest sequence that fits alone; None where nothing grows with the length."""
        return min((role.page_tokens * (role.pool.total - 1) for role in self.roles.values()), default=None)
