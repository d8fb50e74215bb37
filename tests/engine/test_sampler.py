"""Sampling: ties, the cuts in closed form and against transformers, draws without state, rows that cannot be drawn."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from firstlight.engine import sampler
from firstlight.engine.logits import SampleRow
from firstlight.engine.randomness import sample_seed, uniform
from firstlight.engine.sampler import Sampled, kept_weights, sample
from firstlight.engine.sampling_params import SamplingParams

PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = torch.tensor(PROBS).log()
GREEDY = SamplingParams(temperature=0)


def at(params: SamplingParams, index: int = 0, *, seed: int | None = None, vocab_size: int = 2**31) -> SampleRow:
    """Return a row whose output has index tokens."""
    given = params.seed if seed is None else seed
    return SampleRow(
        params=params, ids=[0] * (2 + index), num_prompt=2, known=2 + index, seed=given or 0, vocab_size=vocab_size
    )


def tokens(logits_RV: Tensor, *rows: SampleRow) -> list[int]:
    """Return the tokens of rows that all get one."""
    found = sample(logits_RV, rows)
    assert all(one.error is None for one in found)
    return [one.token for one in found]


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution a row is drawn from."""
    weights_V = kept_weights(logits_V[None], [params])[0].double()
    return weights_V / weights_V.sum()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return the statistic of counts against expected counts."""
    return float(((counts - expected) ** 2 / expected).sum())


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    logits_RV = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -math.inf, -8.0, -9.0]])
    assert tokens(logits_RV, *[at(GREEDY)] * 3) == [1, 0, 2]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 8), []) == []


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, PROBS),
        ({"top_k": 0}, PROBS),
        ({"top_k": -1}, PROBS),
        ({"top_k": 99}, PROBS),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.3}, [0, 0.4, 0, 0, 0]),
        ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_p": 5e-324}, [0, 0.4, 0, 0, 0]),
        ({"min_p": 0.3}, [0, 0.4, 0, 0.25, 0.2]),
        ({"min_p": 1.0}, [0, 0.4, 0, 0, 0]),
        # of the two tokens that top_k keeps, the first alone is 0.4 / 0.65
        ({"top_k": 2, "top_p": 0.6}, [0, 0.4, 0, 0, 0]),
        # of the two that min_p keeps, likewise; top_k after it has three to keep and finds two
        ({"top_k": 3, "min_p": 0.6, "top_p": 0.6}, [0, 0.4, 0, 0, 0]),
        ({"temperature": 0.5}, [p**2 for p in PROBS]),
        ({"temperature": 2.0, "top_k": 2}, [0, 0.4**0.5, 0, 0.25**0.5, 0]),
    ],
)
def test_the_distribution_is_what_the_cuts_leave(params: dict[str, Any], kept: list[float]) -> None:
    expected = torch.tensor(kept, dtype=torch.float64) / sum(kept)
    torch.testing.assert_close(probabilities(LOGITS, SamplingParams(**params)), expected, rtol=1e-6, atol=1e-7)


def test_the_cuts_are_those_of_transformers() -> None:
    drawn = random.Random(4)
    for seed in range(40):
        logits_RV = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 2
        params = SamplingParams(
            temperature=drawn.choice([0.3, 1.0, 1.7]),
            min_p=drawn.choice([0.0, 0.02, 0.2]),
            top_k=drawn.choice([0, 1, 7, 30]),
            top_p=drawn.choice([1.0, 0.95, 0.5]),
        )
        steps: list[Any] = [TemperatureLogitsWarper(params.temperature), MinPLogitsWarper(params.min_p)]
        steps += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        steps += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        expected_RV = logits_RV.clone()
        for step in steps:
            expected_RV = step(torch.zeros(1, 1, dtype=torch.long), expected_RV)
        expected_V = torch.softmax(expected_RV[0].double(), dim=-1)
        got_V = probabilities(logits_RV[0], params)
        assert torch.equal(got_V > 0, expected_V > 0), params
        # fp32 division by the temperature: 2^-24 of logits up to 25
        torch.testing.assert_close(got_V, expected_V, rtol=4e-6, atol=1e-9)


def test_equal_tokens_at_a_cut_are_kept_from_the_lowest_id() -> None:
    equal_V = torch.zeros(6)
    assert probabilities(equal_V, SamplingParams(top_k=2)).nonzero().flatten().tolist() == [0, 1]
    assert probabilities(equal_V, SamplingParams(top_p=0.4)).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e4, 1e300])
def test_large_logits_and_forbidden_tokens_give_a_distribution(temperature: float) -> None:
    probs_V = probabilities(torch.tensor([3e38, -math.inf, -3e38, 1.0]), SamplingParams(temperature=temperature))
    assert probs_V[1] == 0
    assert probs_V.sum().item() == pytest.approx(1.0)


def test_sums_of_weights_do_not_overflow_over_a_large_vocabulary() -> None:
    weights_V = kept_weights(torch.zeros(1, 300_000), [SamplingParams()])[0]
    assert weights_V.min() == weights_V.max() > 2**40
    assert weights_V.cumsum(0)[-1] == 300_000 * int(weights_V[0]) < 2**63


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert tokens(torch.tensor([[0.0, 1e-3, 0.0]]), at(SamplingParams(temperature=5e-324))) == [1]


@pytest.mark.parametrize("along", ["indices", "seeds"])
@pytest.mark.parametrize(("params", "kept"), [({}, PROBS), ({"top_k": 4, "temperature": 2.0}, None)])
def test_draws_follow_the_distribution(along: str, params: dict[str, Any], kept: list[float] | None) -> None:
    num_draws, given = 20_000, SamplingParams(**params)
    places = [(0, i) if along == "indices" else (i, 3) for i in range(num_draws)]
    expected = [p**0.5 * (p != 0.05) for p in PROBS] if kept is None else kept
    ids = list(range(5))
    rows = [
        SampleRow(params=given, ids=ids, num_prompt=-index, known=0, seed=seed, vocab_size=5) for seed, index in places
    ]
    counts = torch.tensor(tokens(LOGITS.expand(num_draws, -1), *rows)).bincount(minlength=5).double()
    expected_V = torch.tensor(expected, dtype=torch.float64)
    possible_V = expected_V > 0
    assert counts[~possible_V].sum() == 0
    # 23.5: passed once in ten thousand with 4 degrees of freedom
    assert chi_square(counts[possible_V], (expected_V / expected_V.sum() * num_draws)[possible_V]) < 23.5


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, 1)], ids=["next index", "next seed", "both"])
def test_neighbouring_random_numbers_are_independent(step: tuple[int, int]) -> None:
    cells = [
        (int(uniform(seed, index) * 8), int(uniform(seed + step[0], index + step[1]) * 8))
        for seed in range(160)
        for index in range(160)
    ]
    counts = torch.tensor([8 * first + second for first, second in cells]).bincount(minlength=64).double()
    # 114: passed once in ten thousand with 63 degrees of freedom
    assert chi_square(counts, torch.full((64,), len(cells) / 64, dtype=torch.float64)) < 114


def test_random_numbers_are_the_published_ones() -> None:
    # the first outputs of splitmix64 with state 0 and 1234567, as its authors' C program prints them
    from firstlight.engine.randomness import mixed

    assert mixed(0) == 0xE220A8397B1DCDAF
    assert mixed(1234567) == 6457827717110365317
    assert all(0 <= uniform(seed, index) < 1 for seed in (0, 2**63 - 1) for index in (0, 10**6))


def test_samples_of_a_request_have_seeds_of_their_own() -> None:
    seeds = [sample_seed(seed, sample) for seed in (0, 1, 7) for sample in range(50)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 0) == 7


def test_the_first_and_the_last_weight_can_be_drawn_and_nothing_of_no_weight() -> None:
    weights_RV = torch.tensor([[0, 3, 0, 5, 0]]).expand(4, -1)
    below_one = 1 - 2.0**-53
    assert sampler.draw(weights_RV, [0.0, 0.374, 0.376, below_one]).tolist() == [1, 1, 3, 3]
    totals = [2**bits + step for bits in range(2, 62) for step in (-1, 0, 1)]
    large_RV = torch.tensor([[0, total - 1, 1, 0] for total in totals])
    assert set(sampler.draw(large_RV, [below_one] * len(totals)).tolist()) <= {1, 2}


def test_top_p_1_keeps_a_token_that_weighs_less_than_the_rounding_of_the_sum() -> None:
    logits_V = torch.tensor([0.0] * 8 + [-36.0])
    assert kept_weights(logits_V[None], [SamplingParams(top_k=9)])[0, -1] == 1


def stream(logits_RV: Tensor, others: list[SamplingParams], *, joins: int = 0, order: int = 0) -> list[int]:
    """Return 16 tokens of a seeded request among others that come and go; logits depend on its index alone."""
    mine = SamplingParams(seed=11, temperature=1.5, top_p=0.9, min_p=0.01)
    got = []
    for index in range(16):
        present = others if index >= joins else []
        rows = [at(params, index + 5, seed=random.getrandbits(60)) for params in present]
        place = random.Random(order + index).randint(0, len(rows))
        rows.insert(place, at(mine, index))
        batch_RV = torch.randn(len(rows), logits_RV.shape[1])
        batch_RV[place] = logits_RV[index]
        got.append(sample(batch_RV, rows)[place].token)
    return got


@pytest.mark.parametrize("num_others", [0, 1, 2, 3])
def test_o1_a_seeded_request_draws_the_same_among_unseeded_ones(num_others: int) -> None:
    logits_RV = torch.randn(16, 301, generator=torch.Generator().manual_seed(5))
    alone = stream(logits_RV, [])
    assert len(set(alone)) > 8
    neighbours = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3, repetition_penalty=1.3)]
    for order in range(3):
        for joins in (0, 7):
            assert stream(logits_RV, neighbours[:num_others], joins=joins, order=order) == alone


def test_weights_of_a_row_are_the_same_to_the_last_bit_wherever_it_stands() -> None:
    # an odd vocabulary shifts each row against the width of vector registers
    logits_RV = torch.randn(9, 1003, generator=torch.Generator().manual_seed(2)) * 4
    params = [SamplingParams(temperature=0.5 + 0.1 * i, top_p=1 - 0.1 * (i % 3), top_k=i * 40) for i in range(9)]
    together_RV = kept_weights(logits_RV, params)
    for row, one in enumerate(params):
        assert torch.equal(kept_weights(logits_RV[row : row + 1].clone(), [one])[0], together_RV[row])


def test_rows_drawn_in_several_blocks_are_those_drawn_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = torch.randn(7, 33, generator=torch.Generator().manual_seed(2))
    rows = [at(SamplingParams(seed=i, temperature=float(i % 3 != 1), logprobs=i), i) for i in range(7)]
    expected = sample(logits_RV, rows)
    monkeypatch.setattr(sampler, "BLOCK_LOGITS", 70)
    assert sample(logits_RV, rows) == expected


def test_a_token_depends_on_seed_and_index_and_on_nothing_before() -> None:
    flat = torch.zeros(1, 4096)
    params = SamplingParams()
    first = [tokens(flat, at(params, index, seed=7))[0] for index in range(8)]
    assert [tokens(flat, at(params, index, seed=7))[0] for index in reversed(range(8))] == first[::-1]
    assert [tokens(flat, at(params, index, seed=8))[0] for index in range(8)] != first
    assert len(set(first)) > 4


def test_a_token_of_the_step_before_counts_like_one_that_is_known() -> None:
    logits_RV = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    for penalty in (1.0, 1.8):
        params = SamplingParams(repetition_penalty=penalty, presence_penalty=penalty - 1)
        known = SampleRow(params=params, ids=[1, 2, 3, 9], num_prompt=2, known=4, seed=5, vocab_size=64)
        ahead = SampleRow(params=params, ids=[1, 2, 3], num_prompt=2, known=3, extra=9, seed=5, vocab_size=64)
        assert sample(logits_RV, [known]) == sample(logits_RV, [ahead])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(logprobs=2)])
def test_k6_padding_of_the_head_is_never_chosen(params: SamplingParams) -> None:
    logits_RV = torch.zeros(3, 8)
    logits_RV[:, 5:] = 50.0
    narrow, wide = at(params, vocab_size=5), at(params, vocab_size=8)
    for seed in range(20):
        chosen = tokens(logits_RV, *[at(params, seed=seed, vocab_size=5)] * 3)
        assert max(chosen) < 5
    mixed = sample(logits_RV, [narrow, wide, narrow])
    assert mixed[0].token == mixed[2].token < 5 <= mixed[1].token
    assert mixed[0] == sample(logits_RV[:1], [narrow])[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(allowed_token_ids=[1], logprobs=1)])
def test_broken_logits_fail_their_own_row_alone(bad: float | None, params: SamplingParams) -> None:
    logits_RV = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = [at(params, seed=seed) for seed in range(3)]
    before = sample(logits_RV, rows)
    broken_RV = logits_RV.clone()
    broken_RV[1, slice(None) if bad is None else 17] = -math.inf if bad is None else bad
    after = sample(broken_RV, rows)
    assert after[1].error is not None and "not finite" in after[1].error and after[1].token == -1
    assert after[1].logprob is None and after[1].top is None
    assert [after[0], after[2]] == [before[0], before[2]]


def test_parameters_that_leave_no_token_fail_their_own_row_alone() -> None:
    logits_RV = torch.zeros(2, 8)
    none_left = SamplingParams(allowed_token_ids=[2], min_tokens=1, logprobs=0)
    rows = [SampleRow(params=none_left, ids=[0], num_prompt=1, known=1, eos_ids=[2], seed=0, vocab_size=8), at(GREEDY)]
    failed, fine = sample(logits_RV, rows)
    assert failed.error is not None and "leave none" in failed.error
    assert fine == Sampled(0)
