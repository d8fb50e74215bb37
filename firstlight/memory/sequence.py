"""SequenceCache: the one owner of a sequence's page tables and live state slot (contract 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firstlight.memory.blocks import Blocks
from firstlight.memory.prefix import Hit


@dataclass(frozen=True, slots=True)
class Hold:
    """What one step reads and writes of a sequence: its slot, and the pages of its first num_tokens tokens.

    Stays as it is when the sequence grows or gives everything back while the step runs.
    """

    pages: Mapping[str, list[int]]
    slot: int
    num_tokens: int


class SequenceCache:
    """Resources of one sequence.

    committed: tokens that the live state covers; pages are valid below it. capacity: tokens that the pages
    held can take. Growing is all or nothing over every role; release gives everything back and may be called twice.
    """

    __slots__ = ("blocks", "capacity", "committed", "pages", "slot")

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.pages: dict[str, list[int]] = {name: [] for name in blocks.roles}
        self.slot = blocks.slots.allocate(1)[0]
        self.committed = 0
        self.capacity = 0

    @classmethod
    def admit(cls, blocks: Blocks, hit: Hit, num_tokens: int) -> SequenceCache | None:
        """Return a sequence that starts behind a cached prefix and can grow to num_tokens; None, with nothing
        taken, if slot or pages are short. The state still has to be copied in from hit.slot."""
        if not blocks.slots.can_allocate(1):
            return None
        for name, pages in hit.pages.items():
            for page in pages:
                blocks.roles[name].pool.share(page)
        if hit.slot is not None:
            # held until the copy is done, or the slot could be evicted for the live one
            blocks.slots.share(hit.slot)
        sequence = cls(blocks) if blocks.slots.can_allocate(1) else None
        if sequence is not None:
            sequence.pages = {name: list(hit.pages.get(name, ())) for name in blocks.roles}
            sequence.committed = sequence.capacity = hit.length
            if sequence.can_reserve(num_tokens):
                sequence.reserve(num_tokens)
                return sequence
            sequence.release()
        else:
            for name, pages in hit.pages.items():
                blocks.roles[name].pool.release(pages)
        if hit.slot is not None:
            blocks.slots.release([hit.slot])
        return None

    def hold(self, num_tokens: int) -> Hold:
        """Return what a step needs that takes the sequence to num_tokens."""
        return Hold(self.pages, self.slot, num_tokens)

    def can_reserve(self, num_tokens: int) -> bool:
        """True if every role has the pages for a length of num_tokens."""
        return all(self.blocks.roles[name].pool.can_allocate(count) for name, count in self._missing(num_tokens))

    def reserve(self, num_tokens: int) -> None:
        """Hold the pages for a length of num_tokens. Raises: MemoryError, with nothing taken."""
        if num_tokens <= self.capacity:
            return
        if not self.can_reserve(num_tokens):
            raise MemoryError(f"no pages for {num_tokens} tokens")
        for name, count in self._missing(num_tokens):
            self.pages[name] += self.blocks.roles[name].pool.allocate(count)
        self.capacity = min(
            (role.page_tokens * len(self.pages[name]) for name, role in self.blocks.roles.items()), default=2**62
        )

    def release(self) -> None:
        """Give back every page and the slot."""
        # new lists: a running step may still read the old ones through its Hold
        given, self.pages = self.pages, {name: [] for name in self.blocks.roles}
        for name, pages in given.items():
            # the least recently released goes first: a prefix is to be eaten up from its end
            self.blocks.roles[name].pool.release(reversed(pages))
        if self.slot:
            self.blocks.slots.release([self.slot])
            self.slot = 0

    def _missing(self, num_tokens: int) -> list[tuple[str, int]]:
        held = self.pages
        return [(name, max(0, self.blocks.pages_for(name, num_tokens) - len(held[name]))) for name in self.blocks.roles]
