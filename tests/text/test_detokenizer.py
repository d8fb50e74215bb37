"""Streaming text: no half characters, and the same text as decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.text.detokenizer import Detokenizer
from firstlight.text.tokenizer import Tokenizer

KINDS = ("demo", "byte_level", "byte_fallback", "metaspace", "word_piece")
TEXTS = {
    "emoji": "a \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 b",
    "cjk": "\u4e16\u754c\u3001\u4f60\u597d",
    "combining": "e\u0301 n\u0303 \u0928\u092e\u0938\u094d\u0924\u0947",
    "replacement": "a \ufffd b",
    "spaces": "  a   b\n\n c ",
}


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Return what each push gives, and at last what flush gives."""
    stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(stream.push(token) for token in ids), stream.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the id of each byte in a byte-fallback vocabulary, none in another."""
    found = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    return [token for token in found if token is not None]


def streams(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return streams of any ids, with whole characters among them, as text has them."""
    texts = ["\u00e9", "\U0001f600", " ab"]
    whole = [byte_ids(tokenizer, text.encode()) or tokenizer.encode(text) for text in texts]
    # ids past the end stand for the padding of a model's head
    anything = st.integers(0, tokenizer.vocab_size + 3).map(lambda token: [token])
    special = st.sampled_from(sorted(tokenizer.backend.special)).map(lambda token: [token])
    parts = st.lists(st.one_of(anything, special, st.sampled_from(whole)), max_size=20)
    return parts.map(lambda lists: [token for part in lists for token in part])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("kind", ["demo", "byte_level"])
def test_text_comes_out_in_whole_characters(kind: str, text: str, tokenizer_of) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    assert len(ids) > len(text) // 2
    got = pieces(tokenizer, ids)
    assert "".join(got) == text == tokenizer.decode(ids)
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in got)


def test_a_character_comes_out_with_its_last_byte(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a\U0001f600b")
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\U0001f600", "b", ""]


def test_a_stream_that_ends_inside_a_character_flushes_it_once(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_level")
    stream = Detokenizer(tokenizer)
    got = [stream.push(token) for token in tokenizer.encode("a\U0001f600")[:-1]]
    assert got == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_lone_invalid_byte_waits_for_the_next_character(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_level")
    start = tokenizer.encode("\U0001f600")[0]
    assert pieces(tokenizer, [start, *tokenizer.encode("ab")]) == ["", "\ufffda", "b", ""]


def test_fallback_bytes_wait_for_the_end_of_their_run(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    word = tokenizer.token_id("b")
    valid, invalid = byte_ids(tokenizer, "\u00e9".encode()), byte_ids(tokenizer, b"\xff")
    assert pieces(tokenizer, [word, *valid, word]) == ["b", "", "", "\u00e9b", ""]
    # the library judges the run as a whole, so the valid character in it is lost too
    assert pieces(tokenizer, [word, *valid, *invalid, word]) == ["b", "", "", "", "\ufffd\ufffd\ufffdb", ""]


def test_special_tokens_inside_a_character_do_not_split_it(tokenizer_of) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_of(kind)
        first, *rest = byte_ids(tokenizer, "\u20ac".encode()) or tokenizer.encode("\u20ac")
        ids = [first, tokenizer.token_id("</s>"), *rest]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "\u20ac"


def test_a_special_token_does_not_end_a_run_of_fallback_bytes(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    valid, invalid = byte_ids(tokenizer, "\u00e9".encode()), byte_ids(tokenizer, b"\xff")
    ids = [*valid, tokenizer.token_id("</s>"), *invalid, tokenizer.token_id("b")]
    assert pieces(tokenizer, ids) == ["", "", "", "", "\ufffd\ufffd\ufffdb", ""]


def test_special_tokens_are_shown_when_asked_for(tokenizer_of) -> None:
    tokenizer = tokenizer_of("demo")
    ids = tokenizer.encode("Hello")
    assert "".join(pieces(tokenizer, ids)) == "Hello"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "<|begin|>Hello"


def test_a_word_keeps_the_space_before_it(tokenizer_of) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    a, word = tokenizer.token_id("\u2581a"), tokenizer.token_id("\u2581is")
    assert pieces(tokenizer, [a, word, a]) == ["a", " is", " a", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_to_the_text_of_all_of_them(kind: str, data: st.DataObject, skip: bool, tokenizer_of) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(streams(tokenizer))
    got = pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(not piece.endswith("\ufffd") for piece in got[:-1])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_decode_is_that_of_the_library(kind: str, data: st.DataObject, skip: bool, tokenizer_of) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(streams(tokenizer))
    library = tokenizer.backend.library
    assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
