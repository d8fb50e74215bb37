"""Log-probabilities: of the raw logits whatever is done to them, in an order without doubt, and of prompts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from firstlight.engine.logits import SampleRow
from firstlight.engine.sampler import likeliest, prompt_logprobs, sample
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError

VOCAB = 50
LOGITS_RV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(9)) * 3
EXPECTED_RV = torch.log_softmax(LOGITS_RV, dim=-1)


def row(**params: Any) -> SampleRow:
    """Return a row of prompt [1, 2] and output [3]."""
    return SampleRow(params=SamplingParams(**params), ids=[1, 2, 3], num_prompt=2, known=3, seed=4, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.2, "top_k": 5, "top_p": 0.5},
        {"allowed_token_ids": [40, 41]},
        {"bad_words_ids": [[i] for i in range(20)], "logit_bias": {30: 99.0}},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "min_p": 0.5},
    ],
)
def test_logprobs_are_of_the_raw_logits_whatever_the_parameters(params: dict[str, Any]) -> None:
    for index, found in enumerate(sample(LOGITS_RV, [row(logprobs=3, **params)] * 4)):
        expected_V = EXPECTED_RV[index]
        order = expected_V.argsort(descending=True).tolist()
        assert found.logprob == expected_V[found.token].item()
        assert found.rank == order.index(found.token) + 1
        assert found.top is not None
        expected = [(token, expected_V[token].item(), rank) for rank, token in enumerate(order[:3], start=1)]
        own = (found.token, found.logprob, found.rank)
        assert list(found.top) == expected + ([] if own in expected else [own])


def test_asking_for_logprobs_changes_no_token() -> None:
    for params in ({"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 4, "repetition_penalty": 2.0}):
        plain = sample(LOGITS_RV, [row(**params)] * 4)
        asked = sample(LOGITS_RV, [row(logprobs=2, **params)] * 4)
        assert [one.token for one in plain] == [one.token for one in asked]
        assert all(one.logprob is one.top is one.rank is None for one in plain)


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 2), (3, 4), (VOCAB, VOCAB), (VOCAB + 9, VOCAB), (-1, VOCAB)])
def test_as_many_as_asked_for_and_the_chosen_one(count: int, length: int) -> None:
    # of 50 tokens, the least likely is chosen
    last = int(LOGITS_RV[0].argmin())
    found = sample(LOGITS_RV[:1], [row(logprobs=count, allowed_token_ids=[last])])[0]
    assert found.top is not None and len(found.top) == length
    assert found.top[-1] == (last, found.logprob, VOCAB)
    assert [entry.rank for entry in found.top[:-1]] == list(range(1, length))


def test_each_row_gets_its_own_number_of_entries() -> None:
    counts = [2, None, 0, 4]
    found = sample(LOGITS_RV, [row(temperature=0, logprobs=count) for count in counts])
    assert [None if one.top is None else len(one.top) for one in found] == [2, None, 1, 4]


def test_equal_logits_rank_by_id() -> None:
    logits_RV = torch.tensor([[0.0, 5.0, -0.0, 5.0, 0.0, -math.inf]])
    params = SamplingParams(allowed_token_ids=[2], logprobs=4)
    found = sample(logits_RV, [SampleRow(params=params, ids=[0], num_prompt=1, known=1, seed=0, vocab_size=6)])[0]
    assert found.top is not None
    assert [(entry.token, entry.rank) for entry in found.top] == [(1, 1), (3, 2), (0, 3), (2, 4)]
    assert found.rank == 4


def test_negative_logits_of_any_size_are_ordered() -> None:
    logits_V = torch.tensor([-1e-30, -2.0, -3e38, 1e-40, -1.5, 3e38, -math.inf, 7.0])
    # all by a sort, fewer by keys
    for count in (8, 7, 3):
        assert likeliest(logits_V[None], count)[0].tolist() == [5, 7, 3, 0, 4, 1, 2, 6][:count]


def test_the_likeliest_of_equals_are_the_lowest_ids_however_many_are_taken() -> None:
    logits_NV = torch.randint(-3, 3, (20, 40), generator=torch.Generator().manual_seed(1)) * 0.5
    all_NV = likeliest(logits_NV, 40)
    for count in (1, 5, 39):
        assert torch.equal(likeliest(logits_NV, count), all_NV[:, :count])


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_o4_prompt_logprobs_are_the_same_in_any_chunks(chunk: int) -> None:
    next_ids = [7, 3, int(LOGITS_RV[2].argmax()), 11]
    found = [
        entries
        for start in range(0, 4, chunk)
        for entries in prompt_logprobs(LOGITS_RV[start : start + chunk], next_ids[start : start + chunk], 2)
    ]
    assert [len(entries) for entries in found] == [3, 3, 2, 3]
    for index, (token, entries) in enumerate(zip(next_ids, found, strict=True)):
        logprobs = {entry.token: entry.logprob for entry in entries}
        assert logprobs[token] == EXPECTED_RV[index, token].item()
        assert [entry.token for entry in entries[:2]] == EXPECTED_RV[index].topk(2).indices.tolist()


def test_prompt_logprobs_leave_out_the_padding_of_the_head() -> None:
    padded_TV = torch.cat([LOGITS_RV, torch.full((4, 6), 99.0)], dim=-1)
    next_ids = [7, 3, 9, 11]
    assert prompt_logprobs(padded_TV, next_ids, 2, vocab_size=VOCAB) == prompt_logprobs(LOGITS_RV, next_ids, 2)
    entry = prompt_logprobs(padded_TV[:1], [VOCAB + 2], 0, vocab_size=VOCAB)[0][0]
    assert entry == (VOCAB + 2, -math.inf, VOCAB + 1)


def test_no_prompt_tokens_have_no_logprobs() -> None:
    assert prompt_logprobs(torch.zeros(0, VOCAB), [], 3) == []


def test_prompt_logprobs_of_broken_logits_are_refused() -> None:
    broken_TV = LOGITS_RV.clone()
    broken_TV[2, 5] = math.nan
    with pytest.raises(FirstlightError, match="not finite"):
        prompt_logprobs(broken_TV, [1, 2, 3, 4], 1)
