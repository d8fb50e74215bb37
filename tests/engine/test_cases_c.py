"""Faults seen in other engines, restated: the prefix cache of hybrid models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tagged_engine import ATTENTION, HYBRID, STATE, continuation, generate, kv, tagged_engine, tokens
from tiny_engine import HYBRIDS, NAMES, assert_solo, engine_of, greedy, prompt, run

from firstlight.layers.indexer import IndexLayer
from firstlight.memory.prefix import Chain
from firstlight.spec.caches import CacheDecl

Tiny = Callable[[str], Path]
UNIT = 64
hybrids = pytest.mark.parametrize("name", HYBRIDS)


@hybrids
def test_c1_pages_without_their_state_are_no_hit(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    run(engine, [prompt(150)])
    engine.runner.pool.blocks.slots.clear_cache()
    (output,) = run(engine, [prompt(150)])
    assert output.num_cached_tokens == 0
    assert_solo(tiny(name), [output])
    assert engine.prefix.counters.state_missing_tokens == 128


@hybrids
def test_c1_a_state_without_its_pages_is_no_hit(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    run(engine, [prompt(150)])
    for role in engine.runner.pool.blocks.roles.values():
        role.pool.clear_cache()
    (output,) = run(engine, [prompt(150)])
    assert output.num_cached_tokens == 0
    assert_solo(tiny(name), [output])


@pytest.mark.parametrize("length", [UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 2 * UNIT + 1])
@pytest.mark.parametrize("name", NAMES)
def test_c2_the_same_prompt_hits_as_soon_as_a_unit_fits(name: str, length: int, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), checkpoint_tokens=4096)
    cold, warm = (run(engine, [prompt(length)], greedy(3))[0] for _ in range(2))
    expected = (length - 1) // UNIT * UNIT
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, expected)
    counters = engine.prefix.counters
    assert (counters.lookups, counters.hits, counters.hit_tokens) == (2, int(expected > 0), expected)
    assert_solo(tiny(name), [cold, warm])


def test_c2_a_context_below_a_unit_serves_without_hits(tiny: Tiny) -> None:
    engine = engine_of(tiny("kimi_linear"), max_model_len=50)
    for _ in range(2):
        (output,) = run(engine, [prompt(40)])
        assert output.num_cached_tokens == 0
        assert_solo(tiny("kimi_linear"), [output])


def test_c2_why_a_hit_was_missed_is_counted() -> None:
    engine = tagged_engine(HYBRID, num_slots=1, max_num_seqs=1)
    for _ in range(2):
        generate(engine, [i % 50 for i in range(130)])
    counters = engine.prefix.counters
    assert (counters.hits, counters.checkpoints) == (0, 0)
    # no slot was left for a checkpoint, and the pages alone would have served so many tokens
    assert counters.checkpoints_skipped == 2
    assert counters.state_missing_tokens == 128


@pytest.mark.parametrize("every", [16, 64, 128, 192])
@pytest.mark.parametrize("sizes", [(16,), (64,), (128,), (16, 128), (48, 64)], ids=str)
def test_c4_states_and_pages_of_any_sizes_agree_on_resume(sizes: tuple[int, ...], every: int) -> None:
    decls = [CacheDecl(pages=tuple(kv(n, f"p{n}") for n in sizes)), CacheDecl(states=(STATE,), grid=64)]
    engine = tagged_engine(decls, num_tokens=64 * 60, num_slots=20, checkpoint_tokens=every)
    unit = engine.runner.pool.blocks.unit_tokens
    ids = [i * 3 % 50 for i in range(3 * unit + 10)]
    generate(engine, ids)
    for length in (unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit + 10):
        (output,) = generate(engine, ids[:length])
        assert tokens(output) == continuation(ids[:length], 8)
        assert output.num_cached_tokens % unit == 0
    assert output.num_cached_tokens == 3 * unit


@pytest.mark.parametrize("decls", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_c7_a_chat_reads_only_what_is_new(decls: tuple[CacheDecl, ...]) -> None:
    engine = tagged_engine(decls, num_slots=20)
    chat: list[int] = [i % 50 for i in range(90)]
    for turn in range(5):
        before = engine.num_tokens
        (output,) = generate(engine, chat, max_tokens=10)
        new = 90 if not turn else 30
        # besides the turn, at most the last unit, and the answer
        assert engine.num_tokens - before <= new + UNIT + 10
        chat = [*chat, *tokens(output), *[turn] * 20]


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v32"])
def test_c7_a_chat_answers_as_if_it_were_read_anew(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    chat, hits = prompt(70), []
    for turn in range(4):
        (output,) = run(engine, [chat], greedy(10))
        assert_solo(tiny(name), [output])
        hits.append(output.num_cached_tokens)
        chat = [*chat, *output.outputs[0].token_ids, *prompt(20, turn + 50)]
    # after 70, 100 and 130 tokens
    assert hits == [0, 64, 64, 128]


def test_c8_an_edit_restarts_from_the_nearest_checkpoint_before_it() -> None:
    engine = tagged_engine(HYBRID, num_tokens=64 * 40, num_slots=20, checkpoint_tokens=UNIT)
    ids = [i * 7 % 50 for i in range(6 * UNIT)]
    generate(engine, ids)
    for place, expected in ((5 * UNIT + 2, 5), (UNIT + 2, 1)):
        edited = [*ids[:place], 49 - ids[place], *ids[place + 1 :]]
        (output,) = generate(engine, edited)
        assert output.num_cached_tokens == expected * UNIT
        assert tokens(output) == continuation(edited, 8)
    # what lies before is kept, and so is the old branch
    assert all(engine.prefix.has_state(ids, Chain(UNIT), n * UNIT) for n in range(1, 6))
    assert generate(engine, [*ids, 1])[0].num_cached_tokens >= 5 * UNIT


@pytest.mark.parametrize("name", ["glm5_next", "kimi_linear"])
def test_c8_an_edited_history_answers_as_if_it_were_new(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), checkpoint_tokens=UNIT)
    ids = prompt(200)
    run(engine, [ids])
    hits = []
    for place in (130, 66, 3):
        (output,) = run(engine, [[*ids[:place], (ids[place] + 1) % 250, *ids[place + 1 :]]])
        assert_solo(tiny(name), [output])
        hits.append(output.num_cached_tokens)
    assert hits == [128, 64, 0]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm5_next"])
def test_c9_the_index_selects_the_same_behind_a_warm_prefix(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), overlap=False)
    seen: list[torch.Tensor] = []
    for module in engine.runner.model.modules():
        if isinstance(module, IndexLayer):
            module.register_forward_hook(lambda owner, args, out: seen.append(out.clone()))
    runs = []
    for _ in range(2):
        seen.clear()
        (output,) = run(engine, [prompt(150)], greedy(6))
        runs.append((output, list(seen)))
    (cold, first), (warm, second) = runs
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 128)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    layers = sum(isinstance(module, IndexLayer) for module in engine.runner.model.modules())
    # physical slots of the same shared pages up to 128; those behind differ by the page alone
    table = {}
    for layer in range(layers):
        old, new = (torch.cat(list(steps[layer::layers])) for steps in (first, second))
        old = old[-len(new) :]
        assert torch.equal(old < 0, new < 0)
        for a, b in zip(old[old >= 0].tolist(), new[new >= 0].tolist(), strict=True):
            assert a % UNIT == b % UNIT
            assert table.setdefault(a // UNIT, b // UNIT) == b // UNIT
    assert len(set(table.values())) == len(table) == 3
