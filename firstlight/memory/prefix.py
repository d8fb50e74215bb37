"""The prefix cache: content-hash chains over units of tokens, and the longest prefix every component has.

A prefix of length L is usable where each role has the pages of every unit below L and, for a model with
recurrent states, a state checkpoint at exactly L exists. Attention is downward closed, states are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from firstlight.memory.blocks import Blocks

# the content of a unit is known by the chain up to it and by its own tokens: a colliding hash is a miss, not a leak
Key = tuple[bytes, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a lookup found. length: tokens that need not be computed. slot: the checkpoint to copy the state from.

    fork: where the pages go on but no state is kept; a checkpoint there would have served this lookup.
    """

    length: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    slot: int | None = None
    fork: int = 0


@dataclass(slots=True)
class Chain:
    """The hashes of a token list's whole units, extended as the list grows. salt keeps tenants apart."""

    unit_tokens: int
    salt: str = ""
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, ids: Sequence[int]) -> None:
        """Hash the units of ids that are complete and not hashed yet."""
        while (len(self.hashes) + 1) * self.unit_tokens <= len(ids):
            begin = len(self.hashes) * self.unit_tokens
            parent = self.hashes[-1] if self.hashes else self.salt.encode()
            unit = ",".join(map(str, ids[begin : begin + self.unit_tokens]))
            self.hashes.append(sha256(parent + b"|" + unit.encode()).digest())

    def key(self, ids: Sequence[int], unit: int, part: int = 0) -> Key:
        """Return the key of a unit's content; part: which of its pages."""
        begin = unit * self.unit_tokens
        return self.hashes[unit], tuple(ids[begin : begin + self.unit_tokens]), part


@dataclass(slots=True)
class PrefixCounters:
    """What lookups found since the start, in tokens and in lookups; why a hit was shorter than the pages allowed."""

    lookups: int = 0
    hits: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    state_missing_tokens: int = 0
    checkpoints: int = 0
    checkpoints_skipped: int = 0


class PrefixCache:
    """Finds and publishes prefixes in Blocks. enabled False: never finds, never publishes."""

    def __init__(self, blocks: Blocks, *, enabled: bool = True) -> None:
        self.blocks, self.enabled = blocks, enabled
        self.counters = PrefixCounters()

    def lookup(self, ids: Sequence[int], chain: Chain) -> Hit:
        """Return the longest usable prefix of ids, at least one token short of the whole."""
        if not self.enabled:
            return Hit()
        chain.extend(ids)
        unit, most = self.blocks.unit_tokens, (len(ids) - 1) // self.blocks.unit_tokens
        pages: dict[str, list[int]] = {name: [] for name in self.blocks.roles}
        reach = self._reach(ids, chain, most, pages)
        length, slot = reach, None
        if self.blocks.has_states:
            while length and (slot := self.blocks.slots.find(chain.key(ids, length - 1))) is None:
                length -= 1
        kept = {name: found[: length * unit // self.blocks.roles[name].page_tokens] for name, found in pages.items()}
        fork = reach * unit if reach > length and self.blocks.roles else 0
        return Hit(length=length * unit, pages=kept, slot=slot, fork=fork)

    def _reach(self, ids: Sequence[int], chain: Chain, most: int, pages: dict[str, list[int]]) -> int:
        """Return how many leading units have their pages in every role; the pages are put in `pages`."""
        for index in range(most):
            for name, role in self.blocks.roles.items():
                parts = range(self.blocks.unit_tokens // role.page_tokens)
                found = [role.pool.find(chain.key(ids, index, part)) for part in parts]
                if any(number is None for number in found):
                    return index
                pages[name] += [number for number in found if number is not None]
        return most

    def publish_pages(
        self, ids: Sequence[int], chain: Chain, pages: dict[str, list[int]], begin: int, end: int
    ) -> None:
        """Make the pages of the units that end in (begin, end] findable."""
        unit = self.blocks.unit_tokens
        if not self.enabled or begin // unit == end // unit:
            return
        chain.extend(ids)
        for index in range(begin // unit, end // unit):
            for name, role in self.blocks.roles.items():
                count = unit // role.page_tokens
                for part in range(count):
                    role.pool.publish(pages[name][index * count + part], chain.key(ids, index, part))

    def publish_state(self, ids: Sequence[int], chain: Chain, position: int, slot: int) -> None:
        """Make the state after `position` tokens, kept in a slot, findable."""
        chain.extend(ids)
        if self.blocks.slots.publish(slot, chain.key(ids, position // self.blocks.unit_tokens - 1)):
            self.counters.checkpoints += 1

    def has_state(self, ids: Sequence[int], chain: Chain, position: int) -> bool:
        """True if the state after `position` tokens of ids is kept."""
        chain.extend(ids)
        return self.blocks.slots.find(chain.key(ids, position // self.blocks.unit_tokens - 1)) is not None

    def count(self, asked: int, hit: Hit) -> None:
        """Count a lookup of `asked` tokens that was made use of; a request may look several times until it runs."""
        counters = self.counters
        counters.lookups += 1
        counters.hits += hit.length > 0
        counters.asked_tokens += asked
        counters.hit_tokens += hit.length
        counters.state_missing_tokens += max(0, hit.fork - hit.length)
