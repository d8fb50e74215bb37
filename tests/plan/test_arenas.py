"""Sizes of the arenas: within the budget, useful, and exactly what is then allocated."""

from __future__ import annotations

import random

import pytest

from firstlight.errors import FirstlightError
from firstlight.memory.arena import CachePool
from firstlight.plan.arenas import ArenaSizes, size_arenas
from firstlight.spec.caches import CacheDecl, PerSequence, PerToken


def pages(num_bytes: int = 256, page_tokens: int = 64, name: str = "kv") -> PerToken:
    """Return a role of so many bytes per token."""
    return PerToken(name=name, shape=(num_bytes // 4,), dtype="float32", page_tokens=page_tokens)


def state(num_bytes: int) -> PerSequence:
    """Return a state of that size."""
    return PerSequence(name="state", shape=(num_bytes // 4,), dtype="float32", kind="recurrent")


HYBRID = (CacheDecl(pages=(pages(),)), CacheDecl(states=(state(65536),)))


def sizes(*decls: CacheDecl, budget: int, seqs: int = 16, length: int = 4096, checkpoints: bool = True) -> ArenaSizes:
    """Return the sizes for these layers."""
    return size_arenas(decls, budget_bytes=budget, max_model_len=length, max_num_seqs=seqs, checkpoints=checkpoints)


@pytest.mark.parametrize("budget", [1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 30])
def test_what_is_allocated_is_what_was_said_and_fits_the_budget(budget: int) -> None:
    found = sizes(*HYBRID, budget=budget)
    pool = CachePool(HYBRID, num_tokens=found.num_tokens, num_slots=found.num_slots)
    assert pool.bytes == found.bytes <= budget


def test_random_models_fit_their_budget() -> None:
    draw = random.Random(1)
    for _ in range(100):
        roles = [pages(4 * draw.randint(1, 100), draw.choice([16, 48, 64, 65, 128]), name) for name in "abc"]
        decls = [CacheDecl(pages=tuple(roles[: draw.randint(0, 3)])) for _ in range(draw.randint(1, 4))]
        if draw.random() < 0.7:
            decls.append(CacheDecl(states=(state(4 * draw.randint(1, 5000)),)))
        budget = draw.randint(200_000, 3_000_000)
        found = sizes(*decls, budget=budget, seqs=draw.randint(1, 64), length=draw.randint(1, 3000))
        pool = CachePool(decls, num_tokens=found.num_tokens, num_slots=found.num_slots)
        assert pool.bytes <= budget
        assert pool.bytes <= found.bytes <= budget


def test_more_is_never_taken_than_the_sequences_can_use() -> None:
    found = sizes(CacheDecl(pages=(pages(),)), budget=1 << 40, seqs=3, length=100)
    assert found.num_tokens == 3 * 128
    found = sizes(*HYBRID, budget=1 << 40, seqs=3, length=100)
    assert found.num_slots == 3 + 3 * 8


def test_a_hybrid_that_does_not_checkpoint_has_a_slot_per_sequence() -> None:
    assert sizes(*HYBRID, budget=1 << 40, seqs=3, checkpoints=False).num_slots == 3


def test_fewer_sequences_are_granted_with_the_number_named() -> None:
    found = sizes(*HYBRID, budget=1 << 20, seqs=256)
    assert 1 <= found.max_num_seqs < 256
    assert found.max_num_seqs <= found.num_slots
    assert f"max_num_seqs is {found.max_num_seqs}, not 256" in found.notices[0]


def test_a_cache_shorter_than_the_context_is_said() -> None:
    found = sizes(CacheDecl(pages=(pages(),)), budget=1 << 20, length=100_000)
    assert any("100000" in notice and str(found.num_tokens) in notice for notice in found.notices)


def test_a_budget_for_nothing_is_refused_with_the_bytes() -> None:
    with pytest.raises(FirstlightError, match="1,000 bytes") as caught:
        sizes(*HYBRID, budget=1000)
    assert "65,536 bytes of state" in caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("slots", [2, 3, 5, 20, 33])
def test_states_and_checkpoints_of_a_model_without_pages_fit_the_budget(slots: int) -> None:
    found = sizes(CacheDecl(states=(state(1024),)), budget=slots * 1024, seqs=64)
    assert 1 <= found.max_num_seqs <= found.num_slots < slots
    assert found.bytes <= slots * 1024


def test_a_model_without_pages_is_sized_by_its_states() -> None:
    found = sizes(CacheDecl(states=(state(1024),)), budget=1 << 20, seqs=8)
    assert found.max_num_seqs == 8
    assert found.num_tokens == 8 * 4096
    assert CachePool(HYBRID[1:], num_tokens=found.num_tokens, num_slots=1).pages == {}
