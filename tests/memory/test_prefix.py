"""The prefix cache: what is found, what is not, and why."""

from __future__ import annotations

import pytest

from firstlight.memory.blocks import Blocks
from firstlight.memory.prefix import Chain, Hit, PrefixCache
from firstlight.memory.sequence import SequenceCache
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken

STATE = PerSequence(name="state", shape=(2,), dtype="float32", kind="recurrent")
IDS = list(range(1000))
SIZES = {"one size": (64,), "small and large": (16, 128), "three": (32, 64, 96)}


def cache_of(*page_tokens: int, states: bool = False, num_tokens: int = 2048, enabled: bool = True) -> PrefixCache:
    """Return an empty cache over roles of these page sizes."""
    pages = tuple(PerToken(name=f"p{n}", shape=(1,), dtype="float32", page_tokens=n) for n in page_tokens)
    blocks = Blocks(
        [CacheDecl(pages=pages), CacheDecl(states=(STATE,) if states else ())], num_tokens=num_tokens, num_slots=6
    )
    return PrefixCache(blocks, enabled=enabled)


def publish(cache: PrefixCache, ids: list[int], *, states: tuple[int, ...] = (), salt: str = "") -> None:
    """Leave the pages of ids in the cache, and states after so many tokens."""
    blocks, chain = cache.blocks, Chain(cache.blocks.unit_tokens, salt)
    sequence = SequenceCache(blocks)
    sequence.reserve(len(ids))
    cache.publish_pages(ids, chain, sequence.pages, 0, len(ids))
    for position in states:
        slots = blocks.slots.allocate(1)
        cache.publish_state(ids, chain, position, slots[0])
        blocks.slots.release(slots)
    sequence.release()


def lookup(cache: PrefixCache, ids: list[int], salt: str = "") -> Hit:
    """Return what a new request with these tokens finds."""
    return cache.lookup(ids, Chain(cache.blocks.unit_tokens, salt))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_hit_is_the_longest_number_of_whole_units_short_of_the_prompt(sizes: tuple[int, ...]) -> None:
    cache = cache_of(*sizes)
    unit = cache.blocks.unit_tokens
    publish(cache, IDS[: 3 * unit + 5])
    for length in (1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit + 5, 4 * unit):
        hit = lookup(cache, IDS[:length])
        assert hit.length == min((length - 1) // unit, 3) * unit
        assert {name: len(pages) for name, pages in hit.pages.items()} == {f"p{n}": hit.length // n for n in sizes}


def test_every_role_must_have_the_pages() -> None:
    cache = cache_of(64, 128)
    publish(cache, IDS[:512])
    role = cache.blocks.roles["p128"].pool
    # all but the first two units of one role are evicted
    held = role.allocate(role.num_available - 2)
    assert lookup(cache, IDS[:512]).length == 256
    role.release(held)


def test_a_different_token_ends_the_hit_at_the_unit_before() -> None:
    cache = cache_of(64)
    publish(cache, IDS[:640])
    assert lookup(cache, [*IDS[:200], -1, *IDS[201:640]]).length == 192
    assert lookup(cache, [-1, *IDS[1:640]]).length == 0


def test_equal_units_behind_different_beginnings_are_different() -> None:
    cache = cache_of(64)
    publish(cache, [*IDS[:64], *IDS[:64], *IDS[:64]])
    assert lookup(cache, [*IDS[64:128], *IDS[:64], 0]).length == 0
    assert lookup(cache, [*IDS[:64], *IDS[:64], 0]).length == 128


def test_tenants_with_another_salt_share_nothing() -> None:
    cache = cache_of(64)
    publish(cache, IDS[:200], salt="one")
    assert [lookup(cache, IDS[:200], salt).length for salt in ("", "one", "two")] == [0, 192, 0]


def test_a_colliding_hash_is_a_miss() -> None:
    cache = cache_of(64)
    publish(cache, IDS[:200])
    chain = Chain(64)
    chain.extend(IDS[:200])
    # the hashes of one text with the tokens of another
    assert cache.lookup([*IDS[:64], *reversed(IDS[:136])], chain).length == 64


def test_a_hash_depends_on_where_token_ids_end() -> None:
    one, two = Chain(2), Chain(2)
    one.extend([1, 23])
    two.extend([12, 3])
    assert one.hashes != two.hashes


def test_a_state_is_needed_at_exactly_the_length() -> None:
    cache = cache_of(64, states=True)
    publish(cache, IDS[:640], states=(128, 448))
    found = {length: lookup(cache, IDS[:length]) for length in (128, 129, 400, 449, 640)}
    assert {length: hit.length for length, hit in found.items()} == {128: 0, 129: 128, 400: 128, 449: 448, 640: 448}
    assert all((hit.slot is not None) == (hit.length > 0) for hit in found.values())
    # where the pages go on, a checkpoint would have served
    assert {length: hit.fork for length, hit in found.items()} == {128: 64, 129: 0, 400: 384, 449: 0, 640: 576}


def test_states_without_pages_are_not_enough() -> None:
    cache = cache_of(64, states=True)
    publish(cache, IDS[:640], states=(128, 448))
    pool = cache.blocks.roles["p64"].pool
    held = pool.allocate(pool.num_available - 4)
    assert lookup(cache, IDS[:640]).length == 128
    pool.release(held)


def test_a_purely_recurrent_model_needs_the_state_only() -> None:
    cache = cache_of(states=True)
    publish(cache, IDS[:640], states=(128, 448))
    assert [lookup(cache, IDS[:length]).length for length in (100, 300, 640)] == [0, 128, 448]
    assert lookup(cache, IDS[:300]).fork == 0


def test_what_is_used_again_outlives_what_is_not() -> None:
    cache = cache_of(64, num_tokens=640)
    publish(cache, IDS[:256])
    publish(cache, IDS[500:756])
    hit = lookup(cache, IDS[:256])
    sequence = SequenceCache.admit(cache.blocks, hit, 256)
    assert sequence is not None
    sequence.release()
    held = cache.blocks.roles["p64"].pool.allocate(6)
    assert lookup(cache, IDS[:256]).length == 192
    cache.blocks.roles["p64"].pool.release(held)


def test_a_prefix_is_evicted_from_its_end() -> None:
    cache = cache_of(64, num_tokens=640)
    publish(cache, IDS[:640])
    lengths = []
    pool = cache.blocks.roles["p64"].pool
    for _ in range(10):
        pool.allocate(1)
        lengths.append(lookup(cache, IDS[:641]).length)
    assert lengths == [576, 512, 448, 384, 320, 256, 192, 128, 64, 0]


def test_a_disabled_cache_keeps_and_finds_nothing() -> None:
    cache = cache_of(64, enabled=False)
    publish(cache, IDS[:200])
    assert lookup(cache, IDS[:200]) == Hit()
    assert cache.blocks.roles["p64"].pool.num_cached == 0


def test_publishing_twice_keeps_the_first() -> None:
    cache = cache_of(64, states=True)
    for _ in range(2):
        publish(cache, IDS[:128], states=(128,))
    assert cache.blocks.roles["p64"].pool.num_cached == 2
    assert cache.blocks.slots.num_cached == 1
    assert cache.counters.checkpoints == 1


def test_a_unit_that_is_not_complete_is_not_published() -> None:
    cache = cache_of(64)
    chain, sequence = Chain(64), SequenceCache(cache.blocks)
    sequence.reserve(200)
    for begin, end in ((0, 63), (63, 64), (64, 127), (127, 130)):
        cache.publish_pages(IDS[:end], chain, sequence.pages, begin, end)
        assert lookup(cache, IDS[:500]).length == end // 64 * 64
    sequence.release()


def test_counters_tell_hits_from_misses_and_why() -> None:
    cache = cache_of(64, states=True)
    publish(cache, IDS[:640], states=(128,))
    for ids in (IDS[:300], IDS[500:600]):
        cache.count(len(ids), lookup(cache, ids))
    counters = cache.counters
    assert (counters.lookups, counters.hits, counters.asked_tokens, counters.hit_tokens) == (2, 1, 400, 128)
    assert counters.state_missing_tokens == 128
