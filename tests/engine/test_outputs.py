"""Tokens to output: text in whole characters, exact ends, and log-probabilities as users read them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from firstlight.engine.logits import SampleRow
from firstlight.engine.outputs import CompletionOutput, Delta, Logprob, OutputProcessor, logprobs_by_id
from firstlight.engine.sampler import Sampled, TopLogprob, sample
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.text.backend import FastBackend
from firstlight.text.tokenizer import Tokenizer

WORDS = ["Window", " there", "ow th", " END", "EN"]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per byte, some words, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "\u0120") for word in WORDS]
    library = Library(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *words])}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<tool>", special=True)])
    backend = FastBackend(library)
    known = frozenset(backend.vocab.values())
    return Tokenizer(backend=backend, eos_ids=(backend.vocab["</s>"],), vocab_size=max(known) + 1, known=known)


TOKENIZER = make_tokenizer()
EOS, TOOL = (TOKENIZER.backend.vocab[name] for name in ("</s>", "<tool>"))
LONG: dict[str, Any] = {"max_tokens": None}


def ids_of(*parts: str | int) -> list[int]:
    """Return the ids of words that are tokens, of other text by bytes, and of ids as they are."""
    found: list[int] = []
    for part in parts:
        word = TOKENIZER.token_id(part.replace(" ", "\u0120")) if isinstance(part, str) else part
        found += TOKENIZER.encode(str(part)) if word is None else [word]
    return found


def run(ids: list[int], reason: Any = "length", **params: Any) -> tuple[CompletionOutput, list[Delta]]:
    """Return the output after pushing ids until it ends, or is ended for a reason; and its deltas."""
    processor = OutputProcessor(TOKENIZER, SamplingParams(**{**LONG, **params}))
    deltas = []
    for token in ids:
        deltas.append(processor.push(token))
        if deltas[-1].finished:
            break
    else:
        deltas.append(processor.finish(reason))
    done = processor.completion()
    assert "".join(delta.text for delta in deltas) == done.text
    assert (done.finish_reason, done.stop_reason) == deltas[-1][1:]
    assert not any(delta.finished for delta in deltas[:-1])
    return done, deltas


K1 = {
    "emoji": "a \U0001f600 b",
    "cjk": "\u4e16\u754c",
    "combining": "e\u0301 \u0928\u092e\u0938\u094d",
}


@pytest.mark.parametrize("text", K1.values(), ids=K1.keys())
def test_k1_a_character_of_several_tokens_comes_out_whole(text: str) -> None:
    done, deltas = run(ids_of(text))
    assert done.text == text
    assert len(done.token_ids) > len(text)
    assert all("\ufffd" not in delta.text for delta in deltas)


def test_k1_invalid_bytes_come_out_once_at_the_end() -> None:
    cut = ids_of("\U0001f600")[:2]
    done, deltas = run([*ids_of("a"), *cut])
    assert done.text == TOKENIZER.decode([*ids_of("a"), *cut]) == "a\ufffd"
    assert [delta.text for delta in deltas] == ["a", "", "", "\ufffd"]
    processor = OutputProcessor(TOKENIZER, SamplingParams(**LONG))
    processor.push(cut[0])
    assert [processor.finish("abort").text, processor.finish("abort").text] == ["\ufffd", ""]
    assert processor.text == "\ufffd"


@pytest.mark.parametrize(("include", "shown"), [(False, "Wind"), (True, "Window there")])
def test_k2_a_stop_over_three_tokens_that_starts_inside_one(include: bool, shown: str) -> None:
    ids = ids_of("Window", " there", "a", "Window")
    done, deltas = run(ids, stop="ow there", include_stop_str_in_output=include)
    assert (done.text, done.finish_reason, done.stop_reason) == (shown, "stop", "ow there")
    assert done.token_ids == tuple(ids[:2])
    assert deltas[0] == Delta("Wind")


def test_k2_text_of_a_token_after_the_stop_is_cut() -> None:
    done, _ = run(ids_of("Window", " there"), stop="th", include_stop_str_in_output=True)
    assert done.text == "Window th"


def test_k2_held_text_comes_out_when_it_cannot_match() -> None:
    _, deltas = run(ids_of("Window", " END", "a"), stop=" END.")
    assert [delta.text for delta in deltas] == ["Window", "", " ENDa", ""]
    _, deltas = run(ids_of("Window", " END"), stop=" END.")
    assert [delta.text for delta in deltas] == ["Window", "", " END"]


def test_a_stop_in_bytes_that_waited_for_their_character_is_found_at_the_end() -> None:
    ids = ids_of("a", *ids_of("\U0001f600")[:2])
    done, _ = run(ids, stop="\ufffd")
    assert (done.text, done.finish_reason, done.stop_reason) == ("a", "stop", "\ufffd")
    done, _ = run(ids, reason="abort", stop="\ufffd")
    assert (done.text, done.finish_reason, done.stop_reason) == ("a", "abort", None)


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        ({}, "Window", None),
        ({"skip_special_tokens": False}, "Window", None),
        ({"include_stop_str_in_output": True}, "Window", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "Window</s>", None),
        ({"stop_token_ids": [EOS]}, "Window", None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, "Window", EOS),
    ],
)
def test_an_end_of_text_token_ends(params: dict[str, Any], text: str, stop_reason: int | None) -> None:
    ids = ids_of("Window", EOS, "a")
    done, _ = run(ids, **params)
    assert (done.text, done.finish_reason, done.stop_reason) == (text, "stop", stop_reason)
    assert done.token_ids == tuple(ids[:2])


def test_an_end_of_text_token_that_is_ignored_is_a_special_token_like_others() -> None:
    ids = ids_of("Window", EOS, TOOL, "a")
    assert run(ids, ignore_eos=True)[0].text == "Windowa"
    assert run(ids, ignore_eos=True, skip_special_tokens=False)[0].text == "Window</s><tool>a"
    assert run(ids, ignore_eos=True)[0].finish_reason == "length"


@pytest.mark.parametrize(("include", "shown"), [(False, "Window"), (True, "Window END")])
def test_a_stop_id_ends_and_is_named(include: bool, shown: str) -> None:
    stop = ids_of(" END")[0]
    done, _ = run(ids_of("Window", " END", "a"), stop_token_ids=[stop], include_stop_str_in_output=include)
    assert (done.text, done.finish_reason, done.stop_reason) == (shown, "stop", stop)


def test_a_stop_id_brings_out_what_was_held() -> None:
    done, deltas = run(ids_of("Window", "EN", EOS), stop="END")
    assert (done.text, done.stop_reason) == ("WindowEN", None)
    assert [delta.text for delta in deltas] == ["Window", "", "EN"]


def test_end_of_text_tokens_may_be_given_by_the_model() -> None:
    processor = OutputProcessor(None, SamplingParams(**LONG), eos_ids=[9])
    assert processor.push(5) == Delta("")
    assert processor.push(9) == Delta("", "stop", None)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_no_stop_ends_the_output_within_min_tokens(min_tokens: int) -> None:
    a, dot = ids_of("a", ".")
    by_text, _ = run([a, dot, a, dot, a], stop=".", min_tokens=min_tokens)
    by_id, _ = run([a, dot, a, dot, a], stop_token_ids=[dot], min_tokens=min_tokens)
    length = 2 if min_tokens < 2 else 4
    assert len(by_text.token_ids) == len(by_id.token_ids) == length > min_tokens
    assert by_text.text == by_id.text == "a.a."[: length - 1]


def test_a_stop_that_begins_within_min_tokens_does_not_leak() -> None:
    done, deltas = run(ids_of("a", "EN", "D"), stop="END", min_tokens=2)
    assert (done.text, done.stop_reason) == ("a", "END")
    assert [delta.text for delta in deltas] == ["a", "", ""]


@pytest.mark.parametrize("max_tokens", [1, 2, None])
def test_k7_max_tokens_is_the_number_of_tokens(max_tokens: int | None) -> None:
    ids = ids_of("Window", " there", " END")
    processor = OutputProcessor(TOKENIZER, SamplingParams(max_tokens=max_tokens))
    # what drafts bring beyond the end is dropped
    deltas = [processor.push(token) for token in ids]
    assert processor.token_ids == ids[:max_tokens]
    assert processor.text == TOKENIZER.decode(ids[:max_tokens])
    assert "".join(delta.text for delta in deltas) == processor.text
    assert deltas[-1].finish_reason == (None if max_tokens is None else "length")


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert run(ids_of("Window", EOS), max_tokens=2)[0].finish_reason == "stop"
    assert run(ids_of("Window", " END"), max_tokens=2, stop="ND")[0].stop_reason == "ND"


def test_an_ending_from_outside_does_not_replace_one_that_was() -> None:
    processor = OutputProcessor(TOKENIZER, SamplingParams(stop=["ow"]))
    assert processor.push(ids_of("Window")[0]) == Delta("Wind", "stop", "ow")
    assert processor.finish("length") == Delta("", "stop", "ow")
    assert processor.completion().finish_reason == "stop"


def test_a_sampling_error_ends_the_output_with_what_there_was() -> None:
    processor = OutputProcessor(TOKENIZER, SamplingParams(stop=["ENDS"]))
    processor.push(ids_of("EN")[0])
    assert processor.push(-1, Sampled(-1, error="broken")) == Delta("EN", "error", None)
    assert processor.token_ids == ids_of("EN")


def test_without_text_only_ids_come_out() -> None:
    for tokenizer, params in ((None, SamplingParams()), (TOKENIZER, SamplingParams(detokenize=False))):
        processor = OutputProcessor(tokenizer, params)
        assert processor.push(5) == Delta("")
        assert processor.finish("length") == Delta("", "length")
        assert processor.completion().token_ids == (5,)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(FirstlightError, match="no tokenizer") as error:
        OutputProcessor(None, SamplingParams(stop="x"))
    assert error.value.where == "stop"


def test_logprobs_are_kept_per_token_and_summed() -> None:
    logits_RV = torch.randn(1, TOKENIZER.vocab_size, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(logprobs=2, seed=3)
    processor = OutputProcessor(TOKENIZER, params)
    expected = 0.0
    for index in range(5):
        ids = [0, *processor.token_ids]
        row = SampleRow(params=params, ids=ids, num_prompt=1, known=index + 1, seed=3, vocab_size=TOKENIZER.vocab_size)
        found = sample(logits_RV, [row])[0]
        expected += torch.log_softmax(logits_RV[0], dim=-1)[found.token].item()
        processor.push(found.token, found)
    done = processor.completion(2)
    assert done.logprobs is not None and done.index == 2 and len(done.logprobs) == 5
    assert done.cumulative_logprob == pytest.approx(expected)
    for token, entries in zip(done.token_ids, done.logprobs, strict=True):
        assert entries[token].decoded_token == TOKENIZER.decode([token], skip_special_tokens=False)
        assert sorted(entry.rank for entry in entries.values())[:2] == [1, 2]


def test_without_logprobs_there_are_none() -> None:
    done, _ = run(ids_of("Window"))
    assert done.logprobs is None and done.cumulative_logprob is None


def test_entries_are_read_by_id() -> None:
    entries = [TopLogprob(EOS, -0.5, 1), TopLogprob(0, -math.inf, 9)]
    assert logprobs_by_id(entries, TOKENIZER)[EOS] == Logprob(-0.5, 1, "</s>")
    assert logprobs_by_id(entries, None) == {EOS: Logprob(-0.5, 1, None), 0: Logprob(-math.inf, 9, None)}


def cut(text: str, stops: list[str], *, include: bool) -> str:
    """Return the text up to the stop that is complete first."""
    ends = [(end, stop) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    return text[: ends[0][0] - (0 if include else len(ends[0][1]))] if ends else text


PARTS = st.lists(st.sampled_from([*WORDS, "e", "\U0001f600", "\u00e9", TOOL]), max_size=8)


@given(parts=PARTS, stops=st.lists(st.sampled_from(["END", "ow", "w t", "\u00e9", "e", "\U0001f600E"]), max_size=2))
@pytest.mark.parametrize("include", [False, True])
def test_streamed_text_is_the_whole_text_cut_at_its_stop(include: bool, parts: list[Any], stops: list[str]) -> None:
    ids = ids_of(*parts)
    done, _ = run(ids, stop=stops, include_stop_str_in_output=include)
    assert done.text == cut(TOKENIZER.decode(ids), stops, include=include)
    assert (done.finish_reason == "stop") == any(stop in TOKENIZER.decode(ids) for stop in stops)
