"""Sampling: greedy ties, the cuts in closed form, and one source of randomness per request."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.engine.sampler import SamplingParams, probabilities, sample
from firstlight.errors import FirstlightError

PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = torch.tensor(PROBS).log()


def draw(logits_RV: Tensor, *params: SamplingParams) -> list[int]:
    return sample(logits_RV, params, [p.generator() for p in params])


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    logits_RV = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -math.inf, -8.0, -9.0]])
    assert draw(logits_RV, *[SamplingParams(temperature=0)] * 3) == [1, 0, 2]


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
        ({"min_p": 0.3}, [0, 0.4, 0, 0.25, 0.2]),
        ({"min_p": 1.0}, [0, 0.4, 0, 0, 0]),
        # of the two tokens that top_k keeps, the first alone is 0.4 / 0.65
        ({"top_k": 2, "top_p": 0.6}, [0, 0.4, 0, 0, 0]),
        ({"temperature": 0.5}, [p**2 for p in PROBS]),
        ({"temperature": 2.0, "top_k": 2}, [0, 0.4**0.5, 0, 0.25**0.5, 0]),
    ],
)
def test_the_distribution_is_what_the_cuts_leave(params: dict[str, Any], kept: list[float]) -> None:
    expected = torch.tensor(kept) / sum(kept)
    torch.testing.assert_close(probabilities(LOGITS, SamplingParams(**params)), expected, rtol=1e-6, atol=1e-7)


def test_equal_tokens_at_a_cut_are_kept_from_the_lowest_id() -> None:
    equal_V = torch.zeros(6)
    assert probabilities(equal_V, SamplingParams(top_k=2)).nonzero().flatten().tolist() == [0, 1]
    assert probabilities(equal_V, SamplingParams(top_p=0.4)).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e4])
def test_large_logits_and_forbidden_tokens_give_a_distribution(temperature: float) -> None:
    probs_V = probabilities(torch.tensor([3e38, -math.inf, -3e38, 1.0]), SamplingParams(temperature=temperature))
    assert probs_V[1] == 0
    assert probs_V.sum().item() == pytest.approx(1.0)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert draw(torch.tensor([[0.0, 1e-3, 0.0]]), SamplingParams(temperature=5e-324)) == [1]


def test_draws_follow_the_distribution() -> None:
    params, num_draws = SamplingParams(seed=0), 4000
    generator = params.generator()
    drawn = [sample(LOGITS[None], [params], [generator])[0] for _ in range(num_draws)]
    for token, prob in enumerate(PROBS):
        # four standard deviations of a binomial share
        assert abs(drawn.count(token) / num_draws - prob) < 4 * math.sqrt(prob * (1 - prob) / num_draws)


def test_a_row_draws_the_same_whatever_its_neighbours_do() -> None:
    logits_RV = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    mine = SamplingParams(seed=11, temperature=1.5, top_p=0.9)

    def stream(*others: SamplingParams) -> list[int]:
        params = [*others, mine]
        generators = [p.generator() for p in params]
        rows = torch.cat([logits_RV[: len(others)], logits_RV[2:]])
        return [sample(rows, params, generators)[-1] for _ in range(20)]

    alone = stream()
    assert len(set(alone)) > 5
    assert stream(SamplingParams(seed=3), SamplingParams(temperature=0)) == alone


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    def stream(params: SamplingParams) -> list[int]:
        generator = params.generator()
        return [sample(torch.zeros(1, 4096), [params], [generator])[0] for _ in range(8)]

    assert stream(SamplingParams(seed=7)) == stream(SamplingParams(seed=7)) != stream(SamplingParams(seed=8))
    assert stream(SamplingParams()) != stream(SamplingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.inf, math.nan, "1", None, True)],
        *[("top_p", value) for value in (0, -1, 1.01, math.nan, None)],
        *[("top_k", value) for value in (-2, 1.5, None, True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("seed", value) for value in (-1, 2**63, 0.5, False)],
        *[("max_tokens", value) for value in (0, -1, 2**63, 1.5, True)],
        *[("stop_token_ids", value) for value in (3, [3], (-1,), ("a",), (True,), (2**63,))],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(FirstlightError, match=f"{name} must be") as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.where == name
    assert repr(value) in error.value.what
