"""Stop strings: an exact cut however the text comes, and nothing held back longer than it must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.text.stops import StopChecker


def cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop that is complete first, looked for in the whole text."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def could_become(text: str, stops: list[str]) -> str:
    """Return the longest end of text that a stop begins with."""
    starts = [stop[:size] for stop in stops for size in range(len(stop))]
    return max((start for start in starts if text.endswith(start)), key=len)


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
def test_k2_pieces_are_cut_where_the_whole_text_is(stops: list[str], pieces: list[str], include: bool) -> None:
    checker = StopChecker(stops, include=include)
    released = [checker.push(piece)[0] for piece in pieces]
    assert ("".join(released) + checker.flush(), checker.matched) == cut("".join(pieces), stops, include=include)


@given(stops=STOPS, pieces=PIECES)
def test_k2_only_what_could_become_a_stop_is_held(stops: list[str], pieces: list[str]) -> None:
    checker, seen, shown = StopChecker(stops), "", ""
    for piece in pieces:
        released, matched = checker.push(piece)
        if matched is not None:
            return
        seen, shown = seen + piece, shown + released
        assert seen == shown + could_become(seen, stops)


@given(stops=STOPS, early=PIECES, late=PIECES)
def test_a_stop_that_is_complete_while_unarmed_passes(stops: list[str], early: list[str], late: list[str]) -> None:
    checker, text, passed = StopChecker(stops), "".join(early + late), len("".join(early))
    released = [checker.push(piece, armed=False)[0] for piece in early] + [checker.push(piece)[0] for piece in late]
    ends = [(end, stop) for end in range(passed + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    expected = (text[: ends[0][0] - len(ends[0][1])], ends[0][1]) if ends else (text, None)
    assert ("".join(released) + checker.flush(), checker.matched) == expected


def test_held_text_comes_out_as_soon_as_it_cannot_match() -> None:
    checker = StopChecker(["<end>"])
    assert [checker.push(piece)[0] for piece in ("a <", "en", "t", "<e", "n")] == ["a ", "", "<ent", "", ""]
    assert checker.flush() == "<en"
    assert checker.flush() == ""


def test_a_beginning_within_a_beginning_is_not_lost() -> None:
    checker = StopChecker(["aab"])
    assert [checker.push(char)[0] for char in "aaa"] == ["", "", "a"]
    assert checker.push("b") == ("", "aab")


@pytest.mark.parametrize(
    ("stops", "shown", "matched"),
    [
        (["abcd", "bc"], "xa", "bc"),
        (["c", "abc"], "xab", "c"),
        (["abc", "c"], "x", "abc"),
    ],
)
def test_of_overlapping_stops_the_first_complete_wins(stops: list[str], shown: str, matched: str) -> None:
    checker = StopChecker(stops)
    got = [checker.push(piece) for piece in ("xa", "bcd")]
    assert ("".join(text for text, _ in got), got[-1][1]) == (shown, matched)


def test_text_after_a_stop_is_dropped() -> None:
    checker = StopChecker(["."], include=True)
    assert checker.push("a.b") == ("a.", ".")
    assert checker.push("c") == ("", ".")
    assert checker.flush() == ""


def test_without_stops_all_text_passes_at_once() -> None:
    assert StopChecker([]).push("abc") == ("abc", None)


def test_a_stop_of_thousands_of_characters_is_found() -> None:
    stop = "a" * 20_000 + "b"
    checker = StopChecker([stop])
    assert all(checker.push("a") == ("", None) for _ in range(20_000))
    assert checker.push("a" * 20_000) == ("a" * 20_000, None)
    assert checker.push("b") == ("", stop)
