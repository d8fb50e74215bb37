"""Free lists of numbered resources: pages of an arena, or state slots. Number 0 is scratch, never owned."""

from __future__ import annotations


class FreeList:
    """Hands out numbers 1 .. total - 1. can_allocate and allocate are a pair."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a free list needs the scratch entry at least, got total={total}")
        self.total = total
        self._free = list(range(total - 1, 0, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Numbers that can still be handed out."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """True if count numbers are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return count numbers, lowest first. Raises: MemoryError if there are not enough; nothing is taken then."""
        if not self.can_allocate(count):
            raise MemoryError(f"{count} asked, {len(self._free)} of {self.total - 1} free")
        taken = [self._free.pop() for _ in range(count)]
        self._owned.update(taken)
        return taken

    def free(self, numbers: list[int]) -> None:
        """Give numbers back. Raises: ValueError for one that is not owned."""
        for number in numbers:
            if number not in self._owned:
                raise ValueError(f"number {number} is not owned")
            self._owned.remove(number)
            self._free.append(number)
