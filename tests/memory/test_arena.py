"""Arenas, free lists and the SequenceCache: who owns what."""

from __future__ import annotations

import pytest

from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache
from firstlight.spec.caches import CacheDecl, CacheDtypes, PerToken
from firstlight.spec.mixers import Decay, DeltaRule, GQAttention, OutputGate

ATTENTION = GQAttention(num_attention_heads=4, num_key_value_heads=2, head_dim=16, scaling=0.25)
RECURRENCE = DeltaRule(
    num_k_heads=2,
    num_v_heads=4,
    head_k_dim=8,
    head_v_dim=16,
    conv_kernel_size=4,
    decay=Decay(granularity="channel", form="softplus"),
    output_gate=OutputGate(act="sigmoid"),
    norm_eps=1e-6,
)


def decls(*mixers: GQAttention | DeltaRule) -> list[CacheDecl]:
    """Return fp32 declarations."""
    return [mixer.declare(CacheDtypes(kv="float32")) for mixer in mixers]


def pool_of(num_tokens: int = 256, num_slots: int = 2) -> CachePool:
    """Return a pool of one attention and one recurrent layer."""
    return CachePool(decls(RECURRENCE, ATTENTION), num_tokens=num_tokens, num_slots=num_slots)


def test_page_zero_and_slot_zero_are_never_held() -> None:
    pool = pool_of()
    for _ in range(2):
        sequence = SequenceCache(pool.blocks)
        sequence.reserve(128)
        assert sequence.slot != 0
        assert 0 not in sequence.pages["kv"]


def test_reserve_takes_nothing_when_one_role_is_short() -> None:
    small = PerToken(name="small", shape=(1,), dtype="float32", page_tokens=16)
    large = PerToken(name="large", shape=(1,), dtype="float32", page_tokens=64)
    pool = CachePool([CacheDecl(pages=(small, large))], num_tokens=64, num_slots=1)
    sequence = SequenceCache(pool.blocks)
    pool.blocks.roles["large"].pool.allocate(1)
    before = pool.blocks.roles["small"].pool.num_available
    assert not sequence.can_reserve(1)
    with pytest.raises(MemoryError):
        sequence.reserve(1)
    assert pool.blocks.roles["small"].pool.num_available == before
    assert sequence.pages == {"small": [], "large": []}


def test_release_gives_everything_back_and_may_be_called_twice() -> None:
    pool = pool_of()
    sequence = SequenceCache(pool.blocks)
    sequence.reserve(200)
    pool.check_ledger([sequence])
    sequence.release()
    sequence.release()
    pool.check_ledger([])
    assert pool.blocks.slots.num_available == 2


def test_bytes_of_the_pool_are_those_of_the_declarations() -> None:
    pool = pool_of(num_tokens=256, num_slots=2)
    attention, recurrence = decls(ATTENTION, RECURRENCE)
    pages = 4 + 1
    expected = pages * 64 * attention.bytes_per_token + 3 * recurrence.bytes_per_sequence
    assert pool.bytes == expected


def test_layers_that_declare_one_role_differently_are_refused() -> None:
    one = CacheDecl(pages=(PerToken(name="kv", shape=(4,), dtype="float32"),))
    other = CacheDecl(pages=(PerToken(name="kv", shape=(8,), dtype="float32"),))
    with pytest.raises(ValueError, match="declares 'kv' differently"):
        CachePool([one, other], num_tokens=64, num_slots=1)


def test_every_role_keeps_its_own_page_size() -> None:
    key = PerToken(name="index", shape=(4,), dtype="float32", tokens_per_entry=5, page_tokens=65)
    kv = PerToken(name="kv", shape=(4,), dtype="float32")
    pool = CachePool([CacheDecl(pages=(key, kv))], num_tokens=130, num_slots=1)
    sequence = SequenceCache(pool.blocks)
    sequence.reserve(66)
    assert [len(sequence.pages[role]) for role in ("index", "kv")] == [2, 2]
    assert pool.views([sequence.hold(66)])[0].pages["index"].entries_per_page == 13
    assert pool.blocks.unit_tokens == 64 * 65


def test_page_that_splits_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        PerToken(name="index", shape=(4,), dtype="float32", tokens_per_entry=5, page_tokens=64)


def test_poison_shows_in_what_was_given_back() -> None:
    pool = CachePool(decls(RECURRENCE, ATTENTION), num_tokens=256, num_slots=2, poison=True)
    sequence = SequenceCache(pool.blocks)
    sequence.reserve(1)
    page, slot = sequence.pages["kv"][0], sequence.slot
    sequence.release()
    assert pool.pages["kv"].planes[1][page].isnan().all()
    assert pool.states["recurrent"].planes[0][slot].isnan().all()


def test_ledger_names_what_does_not_add_up() -> None:
    pool = pool_of()
    sequence = SequenceCache(pool.blocks)
    with pytest.raises(AssertionError):
        pool.check_ledger([])
    sequence.release()
    pool.check_ledger([])
