"""What parameters do to logits: one at a time, against transformers, and on the right tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from firstlight.engine.logits import SampleRow, process
from firstlight.engine.sampling_params import SamplingParams

VOCAB = 16
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
PROMPT, OUTPUT = [4, 5, 6, 5], [7, 4, 7]


def row(
    params: SamplingParams, output: Sequence[int] = OUTPUT, *, extra: bool = False, eos_ids: Sequence[int] = ()
) -> SampleRow:
    """Return a row after PROMPT and output; with extra, the last token is not in ids, which go on with foreign ones."""
    ids = [*PROMPT, *output]
    known = len(ids) - extra
    held = [*ids[:known], 0, 1, 2] if extra else ids
    return SampleRow(
        params=params,
        ids=held,
        num_prompt=len(PROMPT),
        known=known,
        extra=ids[-1] if extra else None,
        eos_ids=eos_ids,
        seed=0,
        vocab_size=VOCAB,
    )


def processed(params: SamplingParams, **options: Any) -> Tensor:
    """Return LOGITS as changed for a row."""
    return process(LOGITS[None].clone(), [row(params, **options)])[0]


def forbidden(logits_V: Tensor) -> list[int]:
    """Return the ids that cannot be chosen; the others must be what they were."""
    allowed_V = logits_V != -math.inf
    assert torch.equal(logits_V[allowed_V], LOGITS[allowed_V])
    return (~allowed_V).nonzero().flatten().tolist()


def test_a_row_that_changes_nothing_costs_nothing() -> None:
    logits_RV = LOGITS[None]
    plain = SamplingParams(temperature=0.3, top_k=2, top_p=0.5, min_p=0.1, logprobs=3, seed=1, max_tokens=3)
    assert process(logits_RV, [row(plain)]) is logits_RV


@pytest.mark.parametrize("extra", [False, True])
def test_repetition_penalty_is_that_of_transformers(extra: bool) -> None:
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    for penalty in (1.7, 0.4):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, LOGITS[None].clone())[0]
        got = processed(SamplingParams(repetition_penalty=penalty), extra=extra)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        assert (got != LOGITS).nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("extra", [False, True])
def test_presence_and_frequency_count_the_output_alone(extra: bool) -> None:
    counts = torch.zeros(VOCAB)
    counts[[4, 7]] = torch.tensor([1.0, 2.0])
    presence = processed(SamplingParams(presence_penalty=0.5), extra=extra)
    torch.testing.assert_close(presence, LOGITS - 0.5 * (counts > 0))
    frequency = processed(SamplingParams(frequency_penalty=-0.25), extra=extra)
    torch.testing.assert_close(frequency, LOGITS + 0.25 * counts)


def test_penalties_of_a_first_token_see_an_empty_output() -> None:
    assert torch.equal(processed(SamplingParams(presence_penalty=2, frequency_penalty=2), output=[]), LOGITS)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("words", [[[3]], [[7, 9]], [[4, 7, 1], [7, 4, 2]], [[3], [4, 7, 9], [7, 4, 7, 0]]])
def test_bad_words_are_those_of_transformers(words: list[list[int]], extra: bool) -> None:
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    expected = NoBadWordsLogitsProcessor(words)(ids, LOGITS[None].clone())[0]
    got = processed(SamplingParams(bad_words=["-"], bad_words_ids=words), extra=extra)
    assert torch.equal(got, expected)
    assert forbidden(got) != []


def test_a_bad_word_that_begins_in_the_prompt_is_none() -> None:
    word = [PROMPT[-1], OUTPUT[0], 9]
    assert forbidden(processed(SamplingParams(bad_words_ids=[word]), output=OUTPUT[:1])) == []
    assert forbidden(processed(SamplingParams(bad_words_ids=[word]), output=word[:2])) == [9]
    assert forbidden(processed(SamplingParams(bad_words_ids=[[1, 2, 3, 4]]), output=[2, 3])) == []


def test_allowed_ids_are_the_only_ones() -> None:
    got = processed(SamplingParams(allowed_token_ids=[3, 9, 9]))
    assert forbidden(got) == [i for i in range(VOCAB) if i not in (3, 9)]


@pytest.mark.parametrize("extra", [False, True])
def test_no_token_ends_the_output_before_min_tokens(extra: bool) -> None:
    def ends(**params: Any) -> list[int]:
        return forbidden(processed(SamplingParams(**params), extra=extra, eos_ids=[2, VOCAB + 3]))

    assert ends(min_tokens=len(OUTPUT) + 1, stop_token_ids=[8]) == [2, 8]
    assert ends(min_tokens=len(OUTPUT) + 1, stop_token_ids=[8], ignore_eos=True) == [8]
    assert ends(min_tokens=len(OUTPUT), stop_token_ids=[8]) == []


def test_a_bias_is_added_to_its_token_alone() -> None:
    expected = LOGITS.clone()
    expected[3] += 5
    expected[9] -= 100
    assert torch.equal(processed(SamplingParams(logit_bias={3: 5, 9: -100.0})), expected)


def test_a_bias_comes_before_the_penalties_and_cannot_allow_what_is_forbidden() -> None:
    got = processed(SamplingParams(allowed_token_ids=[3, 7], logit_bias={7: 50.0, 8: 50.0}, repetition_penalty=2.0))
    assert got[7] == (LOGITS[7] + 50) / 2 and got[8] == -math.inf and got[3] == LOGITS[3]


def test_tokens_of_the_padding_of_the_head_are_passed_over() -> None:
    padded = row(SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), output=[VOCAB, VOCAB + 1])
    got = process(LOGITS[None].clone(), [padded])[0]
    assert (got != LOGITS).nonzero().flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(repetition_penalty=1.5),
        lambda: SamplingParams(presence_penalty=1.0),
        lambda: SamplingParams(allowed_token_ids=[1]),
        lambda: SamplingParams(bad_words_ids=[[1]]),
        lambda: SamplingParams(logit_bias={1: 1.0}),
    ],
)
def test_a_row_leaves_its_neighbours_and_the_raw_logits_alone(make: Callable[[], SamplingParams]) -> None:
    raw_RV = LOGITS.expand(3, -1).clone()
    got_RV = process(raw_RV, [row(SamplingParams()), row(make()), row(SamplingParams())])
    assert torch.equal(raw_RV, LOGITS.expand(3, -1))
    assert torch.equal(got_RV[0], LOGITS) and torch.equal(got_RV[2], LOGITS)
    assert not torch.equal(got_RV[1], LOGITS)
