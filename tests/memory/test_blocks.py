"""Numbers, their holders, and what is found again: BlockPool and Blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from firstlight.memory.blocks import BlockPool, Blocks
from firstlight.memory.prefix import Hit
from firstlight.memory.sequence import SequenceCache
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken

STATE = PerSequence(name="state", shape=(2,), dtype="float32", kind="recurrent")


def page(name: str, page_tokens: int = 64) -> PerToken:
    """Return a role of that page size."""
    return PerToken(name=name, shape=(1,), dtype="float32", page_tokens=page_tokens)


def test_number_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(MemoryError, match="1 asked, 0 of 4 available"):
        pool.allocate(1)


def test_an_allocation_that_is_refused_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    with pytest.raises(MemoryError):
        pool.allocate(2)
    pool.check(dict.fromkeys(held, 1))
    assert pool.num_available == 1


def test_a_shared_number_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(2)
    (number,) = pool.allocate(1)
    pool.share(number)
    pool.release([number])
    assert not pool.can_allocate(1)
    pool.release([number])
    assert pool.can_allocate(1)
    with pytest.raises(ValueError, match="no holder"):
        pool.release([number])


def test_published_content_is_found_until_the_number_is_needed() -> None:
    dropped: list[int] = []
    pool = BlockPool(3, dropped.extend)
    one, two = pool.allocate(2)
    assert pool.publish(one, "one")
    pool.release([one, two])
    assert dropped == [two]
    assert pool.find("one") == one
    assert (pool.num_cached, pool.num_available, pool.num_held) == (1, 2, 0)
    pool.allocate(1)
    assert pool.find("one") == one
    pool.allocate(1)
    assert pool.find("one") is None
    assert dropped == [two, one]
    assert pool.evictions == 1


def test_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(4)
    numbers = pool.allocate(3)
    for number in numbers:
        pool.publish(number, f"key {number}")
    pool.release(numbers)
    pool.share(numbers[0])
    pool.release([numbers[0]])
    assert pool.allocate(1) == [numbers[1]]
    assert pool.find(f"key {numbers[0]}") == numbers[0]


def test_a_key_and_a_number_are_published_once() -> None:
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    assert pool.publish(one, "key")
    assert not pool.publish(two, "key")
    assert not pool.publish(one, "other")
    assert pool.find("other") is None


def test_a_held_number_cannot_be_evicted_and_stays_findable() -> None:
    pool = BlockPool(2)
    (number,) = pool.allocate(1)
    pool.publish(number, "key")
    assert not pool.can_allocate(1)
    assert pool.find("key") == number


def test_clearing_the_cache_frees_what_nobody_holds() -> None:
    dropped: list[int] = []
    pool = BlockPool(3, dropped.extend)
    one, two = pool.allocate(2)
    pool.publish(one, "one")
    pool.publish(two, "two")
    pool.release([one])
    pool.clear_cache()
    assert dropped == [one]
    assert pool.find("two") is None
    pool.check({two: 1})
    pool.release([two])
    assert dropped == [one, two]
    pool.check({})


def test_a_pool_has_its_scratch_entry_at_least() -> None:
    with pytest.raises(ValueError, match="total=0"):
        BlockPool(0)
    assert not BlockPool(1).can_allocate(1)


@pytest.mark.parametrize("held", [{}, {1: 2}, {1: 1, 2: 1}])
def test_the_check_finds_a_wrong_expectation(held: dict[int, int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError):
        pool.check(held)


def test_the_check_finds_a_lost_number() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check({})


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model of it: holders counted by hand, content remembered by number."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, self.dropped)
        self.held: Counter[int] = Counter()
        self.content: dict[int, int] = {}
        self.keys = 0

    def dropped(self, numbers: list[int]) -> None:
        """Forget content that is gone; nothing that is held may go."""
        for number in numbers:
            assert not self.held[number]
            self.content.pop(number, None)

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        if self.pool.can_allocate(count):
            numbers = self.pool.allocate(count)
            assert len(set(numbers)) == count
            assert not any(self.held[number] for number in numbers)
            self.held.update(numbers)
        else:
            assert count > 6 - len(+self.held)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if +self.held:
            number = data.draw(st.sampled_from(sorted(+self.held)))
            self.held[number] -= 1
            self.pool.release([number])

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if +self.held:
            number = data.draw(st.sampled_from(sorted(+self.held)))
            if self.pool.publish(number, self.keys):
                assert number not in self.content
                self.content[number] = self.keys
                self.keys += 1

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.content:
            number = data.draw(st.sampled_from(sorted(self.content)))
            self.pool.share(number)
            self.held[number] += 1

    @invariant()
    def agree(self) -> None:
        self.pool.check(+self.held)
        assert {key: self.pool.find(key) for key in self.content.values()} == {k: n for n, k in self.content.items()}
        assert self.pool.num_available == 6 - len(+self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(derandomize=True, deadline=None, database=None, max_examples=20)


def test_a_unit_is_whole_in_every_page_size_and_grid() -> None:
    decls = [CacheDecl(pages=(page("a", 48), page("b", 80))), CacheDecl(states=(STATE,), grid=128)]
    assert Blocks(decls, num_tokens=100, num_slots=1).unit_tokens == 1920
    assert Blocks([CacheDecl()], num_tokens=100, num_slots=1).unit_tokens == 64


def test_pages_are_counted_per_role() -> None:
    blocks = Blocks([CacheDecl(pages=(page("a", 16), page("b", 64)))], num_tokens=100, num_slots=1)
    assert [blocks.roles[name].pool.total for name in "ab"] == [8, 3]
    assert [blocks.pages_for("a", n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert blocks.most_tokens() == 112
    assert blocks.can_ever_hold(112)
    assert not blocks.can_ever_hold(113)


def test_without_pages_any_length_fits() -> None:
    blocks = Blocks([CacheDecl(states=(STATE,))], num_tokens=1, num_slots=1)
    assert blocks.most_tokens() is None
    assert blocks.can_ever_hold(10**9)


def test_only_states_that_are_copied_make_checkpoints_needed() -> None:
    ring = PerSequence(name="ring", shape=(2,), dtype="float32", kind="ring", checkpoint="none")
    assert not Blocks([CacheDecl(states=(ring,))], num_tokens=1, num_slots=1).has_states
    assert Blocks([CacheDecl(states=(STATE,))], num_tokens=1, num_slots=1).has_states


def hit_of(blocks: Blocks) -> Hit:
    """Return a hit on one page of each role and a checkpoint, all cached."""
    before = SequenceCache(blocks)
    before.reserve(64)
    for name, pages in before.pages.items():
        blocks.roles[name].pool.publish(pages[0], name)
    blocks.slots.publish(before.slot, "state")
    hit = Hit(length=64, pages={name: list(pages) for name, pages in before.pages.items()}, slot=before.slot)
    before.release()
    return hit


@pytest.mark.parametrize("short", ["pages", "slots", "both slots", "nothing"])
def test_admission_takes_all_or_nothing(short: str) -> None:
    blocks = Blocks([CacheDecl(pages=(page("a"), page("b")), states=(STATE,))], num_tokens=256, num_slots=3)
    hit = hit_of(blocks)
    taken = {"pages": (2, 0), "slots": (0, 2), "both slots": (0, 3), "nothing": (0, 0)}[short]
    pages, slots = blocks.roles["b"].pool.allocate(taken[0]), blocks.slots.allocate(taken[1])
    sequence = SequenceCache.admit(blocks, hit, 200)
    if short == "nothing":
        assert sequence is not None
        assert (sequence.committed, sequence.capacity) == (64, 256)
        assert all(sequence.pages[name][:1] == hit.pages[name] for name in "ab")
        assert sequence.slot != hit.slot
        # the checkpoint stays pinned until it has been copied
        blocks.slots.check({sequence.slot: 1, hit.slot: 1})
        return
    assert sequence is None
    blocks.roles["a"].pool.check({})
    blocks.roles["b"].pool.check(dict.fromkeys(pages, 1))
    blocks.slots.check(dict.fromkeys(slots, 1))


def test_a_hold_stays_what_it_was_when_the_sequence_is_gone() -> None:
    blocks = Blocks([CacheDecl(pages=(page("a"),))], num_tokens=256, num_slots=1)
    sequence = SequenceCache(blocks)
    sequence.reserve(100)
    pages, slot = list(sequence.pages["a"]), sequence.slot
    hold = sequence.hold(100)
    sequence.reserve(200)
    sequence.release()
    assert hold.pages["a"][: len(pages)] == pages
    assert (hold.slot, hold.num_tokens) == (slot, 100)
