"""Faults seen in other engines, restated: capacity."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_engine import HYBRIDS, NAMES, assert_solo, declared, engine_of, prompt, run

from firstlight.engine.args import EngineArgs
from firstlight.engine.build import build_engine
from firstlight.engine.llm import LLM
from firstlight.errors import FirstlightError
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache
from firstlight.plan.arenas import ArenaSizes, size_arenas
from firstlight.spec.caches import CacheDecl, CacheDtypes
from firstlight.spec.mixers import Decay, DeltaRule, GQAttention, Indexer, KeyPool, MLAttention, OutputGate

Tiny = Callable[[str], Path]


def declarations(folder: Path) -> list[CacheDecl]:
    """Return what each layer of a checkpoint keeps, in fp32."""
    found, plan = declared(folder)
    return [layer.mixer.declare(plan.precision.cache_dtypes()) for layer in found.arch.layers]


def asked(decls: list[CacheDecl], budget: int) -> tuple[ArenaSizes | None, str]:
    """Return the sizes for a budget, or why there are none."""
    try:
        return size_arenas(decls, budget_bytes=budget, max_model_len=512, max_num_seqs=256, checkpoints=True), ""
    except FirstlightError as error:
        return None, str(error)


@pytest.mark.parametrize("name", NAMES)
def test_n1_any_budget_gives_a_size_that_fits_or_an_early_refusal(name: str, tiny: Tiny) -> None:
    decls = declarations(tiny(name))
    refused = granted = 0
    for shift in range(10, 27):
        budget = 3 << shift
        sizes, words = asked(decls, budget)
        if sizes is None:
            refused += 1
            assert f"{budget:,}" in words
            continue
        granted += 1
        assert 1 <= sizes.max_num_seqs <= sizes.num_slots
        assert sizes.max_num_seqs == 256 or f"max_num_seqs is {sizes.max_num_seqs}" in sizes.notices[0]
        pool = CachePool(decls, num_tokens=sizes.num_tokens, num_slots=sizes.num_slots)
        assert pool.bytes == sizes.bytes <= budget
    assert refused and granted


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", HYBRIDS)
def test_n1_more_sequences_than_slots_are_served_in_turns(name: str, slots: int, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), state_slots=slots, max_num_seqs=8)
    assert engine.config.scheduler.max_num_seqs == slots
    assert_solo(tiny(name), run(engine, [prompt(20, i) for i in range(5)]))


def random_layer(draw: random.Random) -> GQAttention | MLAttention | DeltaRule:
    """Return a mixer with odd sizes."""
    kind = draw.choice(["attention", "latent", "recurrence"])
    if kind == "attention":
        heads = draw.randint(1, 5)
        return GQAttention(num_attention_heads=heads, num_key_value_heads=heads, head_dim=6, scaling=1.0)
    if kind == "recurrence":
        return DeltaRule(
            num_k_heads=3,
            num_v_heads=3,
            head_k_dim=7,
            head_v_dim=11,
            conv_kernel_size=4,
            decay=Decay(granularity="channel", form="softplus"),
            output_gate=OutputGate(act="sigmoid"),
            norm_eps=1e-6,
        )
    pool = draw.choice([None, KeyPool(size=draw.choice([2, 3, 4, 5, 7]))])
    return MLAttention(
        num_attention_heads=2,
        kv_lora_rank=9,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        latent_norm_eps=1e-6,
        scaling=1.0,
        q_lora_rank=8,
        indexer=draw.choice([None, Indexer(num_heads=2, head_dim=5, topk=8, pool=pool)]),
    )


def test_n2_page_sizes_that_do_not_divide_are_allocated() -> None:
    draw, units = random.Random(3), set()
    for _ in range(200):
        # one of each kind, or roles of one name would differ
        kinds = {type(layer): layer for layer in (random_layer(draw) for _ in range(4))}
        decls = [mixer.declare(CacheDtypes(kv="float32", index="float32")) for mixer in kinds.values()]
        sizes = size_arenas(decls, budget_bytes=1 << 20, max_model_len=700, max_num_seqs=4, checkpoints=True)
        pool = CachePool(decls, num_tokens=sizes.num_tokens, num_slots=sizes.num_slots)
        assert pool.bytes == sizes.bytes <= 1 << 20
        units.add(pool.blocks.unit_tokens)
        sequence = SequenceCache(pool.blocks)
        sequence.reserve(min(700, pool.blocks.most_tokens() or 700))
        pool.check_ledger([sequence])
        sequence.release()
    # 66 = 22 x 3 and so on: units that are no power of two were among them
    assert any(unit % 64 == 0 and unit > 64 for unit in units)


@pytest.mark.parametrize("name", ["kimi_linear", "glm5_next", "deepseek_v32", "glm_moe_dsa", "qwen3_moe"])
def test_n4_what_is_planned_is_what_is_allocated(name: str, tiny: Tiny) -> None:
    found, plan = declared(tiny(name))
    for asked in ({}, {"cache_tokens": 640, "state_slots": 5}):
        args = EngineArgs(max_model_len=256, max_num_seqs=4, **asked)
        engine, _, sizes = build_engine(found, plan, args)
        pool = engine.runner.pool
        assert pool.bytes == sizes.bytes
        assert pool.blocks.slots.total - 1 == sizes.num_slots >= engine.config.scheduler.max_num_seqs
        assert all(role.page_tokens * (role.pool.total - 1) >= sizes.num_tokens for role in pool.blocks.roles.values())
        assert_solo(tiny(name), run(engine, [prompt(20)]))
    llm = LLM(str(tiny(name)), dtype="float32", max_model_len=256, max_num_seqs=4)
    assert llm.sizes.num_slots == llm.engine.runner.pool.blocks.slots.total - 1
    assert llm.sizes.bytes == llm.engine.runner.pool.bytes
    llm.close()


def test_n5_only_layers_that_attend_cost_bytes_per_token(tiny: Tiny) -> None:
    expected = {
        # layer 3 of 5: 32 latent values and 8 rotary ones
        "kimi_linear": 40 * 4,
        # layers 3 and 7 of 8: 32 latent values, and 16 index values for every 4 tokens
        "glm5_next": 2 * (32 + 16 / 4) * 4,
        # 5 layers attend, 3 of them have an index of their own
        "glm_moe_dsa": (5 * 40 + 3 * 16) * 4,
    }
    for name, num_bytes in expected.items():
        decls = declarations(tiny(name))
        assert sum(decl.bytes_per_token for decl in decls) == num_bytes
        pool = CachePool(decls, num_tokens=6400, num_slots=1)
        states = 2 * sum(decl.bytes_per_sequence for decl in decls)
        assert pool.bytes - states == 6464 * num_bytes
