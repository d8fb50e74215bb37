"""Metamorphic properties in fp32: a request's output is its own, whatever the schedule, the neighbours or the cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tagged_engine import ATTENTION, HYBRID, RECURRENT, continuation, generate, tagged_engine, tokens
from tagged_engine import check as tagged_check
from tiny_engine import (
    HYBRIDS,
    LOGPROB_TOLERANCE,
    NAMES,
    assert_same,
    assert_solo,
    check,
    drain,
    engine_of,
    greedy,
    prompt,
    run,
    solo,
)

from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.prefix import Chain

Tiny = Callable[[str], Path]
UNIT = 64
PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 5, 63, 64, 65, 130, 150, 20))]
both_ways = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
every_model = pytest.mark.parametrize("name", NAMES)


@both_ways
@every_model
def test_a_request_gives_the_same_in_any_batch_and_order(name: str, overlap: bool, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), overlap=overlap, enable_prefix_caching=False)
    order = random.Random(overlap).sample(PROMPTS, len(PROMPTS))
    assert_solo(tiny(name), run(engine, order))


@every_model
def test_a_request_gives_the_same_whenever_it_arrives(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    names = []
    for ids in PROMPTS:
        names.append(engine.add(ids, greedy()))
        engine.step()
        check(engine)
    drain(engine)
    assert_solo(tiny(name), [engine.pop(one) for one in names])


@pytest.mark.parametrize(("chunk", "overlap"), [(1, True), (7, False), (16, True), (64, False), (512, True)])
@every_model
def test_the_chunk_size_changes_nothing(name: str, chunk: int, overlap: bool, tiny: Tiny) -> None:
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": 1 if chunk == 1 else 4}
    engine = engine_of(tiny(name), overlap=overlap, enable_prefix_caching=False, **limits)
    assert_solo(tiny(name), run(engine, [PROMPTS[4], PROMPTS[7]]))


@both_ways
@every_model
def test_a_warm_prefix_gives_what_a_cold_one_gives(name: str, overlap: bool, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), overlap=overlap)
    for cached in (0, 128, 128):
        outputs = run(engine, [PROMPTS[6]])
        assert_solo(tiny(name), outputs)
        assert outputs[0].num_cached_tokens == cached


@every_model
def test_a_fork_in_the_middle_of_a_page_continues_from_the_last_whole_one(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    trunk = PROMPTS[6]
    branches = [trunk[:100] + prompt(length, seed) for seed, length in ((7, 20), (8, 50), (9, 90))]
    hits = []
    for ids in (trunk, *branches, trunk):
        outputs = run(engine, [ids])
        assert_solo(tiny(name), outputs)
        hits.append(outputs[0].num_cached_tokens)
    # a recurrent state at the fork is kept from the first branch on
    assert hits == ([0, 0, 64, 64, 128] if name in HYBRIDS else [0, 64, 64, 64, 128])


@pytest.mark.parametrize(("chunk", "overlap"), [(10, True), (64, False), (64, True)])
@every_model
def test_preempted_requests_end_as_if_they_had_never_been(name: str, chunk: int, overlap: bool, tiny: Tiny) -> None:
    limits = {"cache_tokens": 256, "max_num_batched_tokens": chunk, "max_num_seqs": 4}
    engine = engine_of(tiny(name), overlap=overlap, **limits)
    outputs = run(engine, [prompt(length, length) for length in (50, 57, 60, 62)], greedy(12))
    assert_solo(tiny(name), outputs)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_preempted_request_resumes_from_its_checkpoint(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), max_num_seqs=2)
    names = [engine.add(prompt(100, seed), greedy(16)) for seed in range(2)]
    for _ in range(8):
        engine.step()
    victim = engine.scheduler.running[1]
    before = engine.num_tokens
    engine.scheduler._preempt(victim)
    drain(engine)
    assert_solo(tiny(name), [engine.pop(one) for one in names])
    # 64 of its tokens come from the checkpoint, so it computes again what is behind it, and one for each of the rest
    assert engine.num_tokens - before <= 2 * 16 + (100 + 8 - 64)


@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v32"])
def test_an_abort_at_any_step_disturbs_nobody(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), max_num_batched_tokens=32, cache_tokens=512)
    for when in range(0, 12, 2):
        kept = engine.add(PROMPTS[4], greedy(6))
        gone = engine.add(PROMPTS[5], greedy(6))
        for _ in range(when):
            engine.step()
        engine.abort(gone)
        check(engine)
        drain(engine)
        assert engine.pop(gone).outputs[0].finish_reason in ("abort", "length")
        assert_solo(tiny(name), [engine.pop(kept)])


@pytest.mark.parametrize("decls", [HYBRID, ATTENTION, RECURRENT], ids=["hybrid", "attention", "recurrent"])
@both_ways
def test_an_abort_at_any_step_leaks_nothing(decls: tuple, overlap: bool) -> None:
    prompts = [[i % 50 for i in range(length)] for length in (100, 130, 7)]
    for when in range(20):
        engine = tagged_engine(decls, overlap=overlap)
        asked = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
        names = [engine.add(ids, asked) for ids in prompts]
        for _ in range(when):
            engine.step()
            tagged_check(engine)
        for name in names[when % 3 :: 2]:
            engine.abort(name)
            tagged_check(engine)
        # what was given back is used again
        (after,) = generate(engine, prompts[0], max_tokens=12)
        assert tokens(after) == continuation(prompts[0], 12)


@every_model
def test_a_after_b_is_a(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), cache_tokens=320, state_slots=3, max_num_seqs=2)
    other = PROMPTS[6][:70] + prompt(90, 11)
    for ids in (PROMPTS[6], other, PROMPTS[6], PROMPTS[5], other, PROMPTS[6]):
        assert_solo(tiny(name), run(engine, [ids]))


@every_model
def test_a_seeded_draw_is_independent_of_neighbours(name: str, tiny: Tiny) -> None:
    asked = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True, detokenize=False)
    other = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, detokenize=False)
    drawn = set()
    for neighbours in range(4):
        engine = engine_of(tiny(name), overlap=neighbours % 2 == 0)
        before = [engine.add(ids, other) for ids in PROMPTS[:neighbours]]
        found = engine.add(PROMPTS[5], asked)
        drain(engine)
        drawn.add(engine.pop(found).outputs[0].token_ids)
        assert all(len(engine.pop(one).outputs[0].token_ids) == 14 for one in before)
    assert len(drawn) == 1


def prompt_values(output: RequestOutput) -> list[float]:
    """Return the log-probabilities of the prompt's own tokens."""
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    following = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entries[token].logprob for token, entries in following if entries is not None]


@every_model
def test_prompt_logprobs_are_the_same_cold_and_warm(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    asked = greedy(4, prompt_logprobs=0)
    cold, warm = (prompt_values(run(engine, [PROMPTS[6]], asked)[0]) for _ in range(2))
    assert len(cold) == len(warm) == len(PROMPTS[6]) - 1
    assert max(abs(a - b) for a, b in zip(cold, warm, strict=True)) <= LOGPROB_TOLERANCE


@both_ways
def test_prompt_logprobs_survive_a_preemption(overlap: bool, tiny: Tiny) -> None:
    folder = tiny("qwen3_moe")
    prompts = [prompt(length, length) for length in (50, 57, 60, 62)]
    asked = greedy(20, prompt_logprobs=0)
    alone = [run(engine_of(folder), [ids], asked)[0] for ids in prompts]
    engine = engine_of(folder, overlap=overlap, cache_tokens=256, max_num_seqs=4)
    crowded = run(engine, prompts, asked)
    assert engine.scheduler.num_preemptions > 0
    for one, other in zip(alone, crowded, strict=True):
        pairs = zip(prompt_values(one), prompt_values(other), strict=True)
        assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_moe"])
def test_n_continuations_share_the_prompt_and_the_first_is_that_of_one(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name))
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    (several,) = run(engine, [PROMPTS[6]], SamplingParams(n=3, **asked))
    found = [output.token_ids for output in several.outputs]
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert len(set(found)) == 3
    # the prompt once, its part behind the last checkpoint for each, and the tokens that are read back
    assert engine.num_tokens <= 150 + 2 * (150 - 128) + 3 * 8
    for overlap in (True, False):
        (one,) = run(engine_of(tiny(name), overlap=overlap), [PROMPTS[6]], SamplingParams(**asked))
        assert one.outputs[0].token_ids == found[0]


@pytest.mark.parametrize("decls", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
def test_a_prefix_shared_by_32_requests_is_stored_once(decls: tuple) -> None:
    shared = [i % 50 for i in range(4096)]
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    engine = tagged_engine(decls, num_tokens=64 * 200, num_slots=40, max_model_len=8192, **limits)
    asked = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    names = [engine.add([*shared, i, i], asked) for i in range(32)]
    while len(engine.scheduler.running) < 32:
        engine.step()
        tagged_check(engine)
    (role,) = engine.runner.pool.blocks.roles.values()
    assert role.pool.num_held == 4096 // UNIT + 32
    while engine.has_work:
        engine.step()
    assert engine.num_tokens == 4096 + 32 * (2 + 3)
    for i, name in enumerate(names):
        assert tokens(engine.pop(name)) == continuation([*shared, i, i], 4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_checkpoint_costs_no_second_forward(name: str, tiny: Tiny) -> None:
    counts = []
    for cached in (False, True):
        limits = {"max_num_batched_tokens": 512, "checkpoint_tokens": 64}
        engine = engine_of(tiny(name), overlap=False, enable_prefix_caching=cached, **limits)
        run(engine, [PROMPTS[3] + PROMPTS[7]], greedy(4))
        counts.append((engine.num_steps, engine.num_tokens, engine.prefix.counters.checkpoints))
    assert counts == [(4, 87, 0), (4, 87, 1)]


@pytest.mark.parametrize("decls", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_states_are_kept_at_the_end_at_forks_and_every_so_many_tokens(decls: tuple) -> None:
    ids = [i * 7 % 50 for i in range(1000)]
    engine = tagged_engine(decls, num_slots=20, checkpoint_tokens=256, max_num_batched_tokens=300)
    generate(engine, ids)

    def kept() -> list[int]:
        return [p for p in range(UNIT, 1001, UNIT) if engine.prefix.has_state(ids, Chain(UNIT), p)]

    assert kept() == [256, 512, 768, 960]
    branch = [*ids[:400], *reversed(ids[:200])]
    (first,) = generate(engine, branch)
    assert first.num_cached_tokens == 256
    # the pages of the branch went on to 384
    assert kept() == ([256, 384, 512, 768, 960] if decls is HYBRID else [256, 512, 768, 960])
    (second,) = generate(engine, [*ids[:400], 1, 2, 3])
    assert second.num_cached_tokens == (384 if decls is HYBRID else 256)


def test_hit_lengths_are_whole_units() -> None:
    engine = tagged_engine(num_slots=30, num_tokens=64 * 60, checkpoint_tokens=100)
    ids = [i * 11 % 50 for i in range(500)]
    generate(engine, ids)
    hits = [generate(engine, ids[:length])[0].num_cached_tokens for length in (1, 63, 64, 65, 128, 129, 300, 499, 500)]
    assert all(hit % UNIT == 0 for hit in hits)
    # checkpoint_tokens=100 is taken for the next multiple
    assert hits == [0, 0, 0, 0, 64, 128, 256, 448, 448]


def test_the_oracle_of_this_file_sees_a_wrong_token(tiny: Tiny) -> None:
    (output,) = run(engine_of(tiny("qwen3_moe")), [PROMPTS[4]])
    with pytest.raises(AssertionError):
        assert_same(output.outputs[0], solo(tiny("qwen3_moe"), PROMPTS[5], 8))
