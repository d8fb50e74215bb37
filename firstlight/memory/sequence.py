"""SequenceCache: the one owner of a sequence's page tables and live state slot (contract 3)."""

from __future__ import annotations

from firstlight.memory.arena import CachePool


class SequenceCache:
    """Resources of one sequence in a CachePool.

    committed: tokens that the live state covers; pages are valid below it. Growing is all or
    nothing over every role; release gives everything back and may be called twice.
    """

    def __init__(self, pool: CachePool) -> None:
        self.pool = pool
        self.pages: dict[str, list[int]] = {role: [] for role in pool.pages}
        self.slot = pool.slots.allocate(1)[0]
        self.committed = 0

    def can_reserve(self, num_tokens: int) -> bool:
        """True if every role has the pages for a length of num_tokens."""
        missing = self._missing(num_tokens)
        return all(self.pool.pages[role].free.can_allocate(count) for role, count in missing.items())

    def reserve(self, num_tokens: int) -> None:
        """Own the pages for a length of num_tokens. Raises: MemoryError, with nothing taken."""
        if not self.can_reserve(num_tokens):
            raise MemoryError(f"no pages for {num_tokens} tokens")
        for role, count in self._missing(num_tokens).items():
            self.pages[role] += self.pool.pages[role].free.allocate(count)

    def commit(self, num_tokens: int) -> None:
        """Record that the next num_tokens tokens are in the pages and in the live state."""
        self.committed += num_tokens

    def release(self) -> None:
        """Give back every page and the slot."""
        for role, pages in self.pages.items():
            self.pool.pages[role].free.free(pages)
            self.pages[role] = []
        if self.slot:
            self.pool.slots.free([self.slot])
            self.slot = 0

    def _missing(self, num_tokens: int) -> dict[str, int]:
        counts = {}
        for role, arena in self.pool.pages.items():
            counts[role] = max(0, -(-num_tokens // arena.decl.page_tokens) - len(self.pages[role]))
        return counts
