"""Numbers for people."""

from __future__ import annotations

import pytest

from firstlight.plan.amounts import amount, quantity, tokens


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (144.5, "144"),
        (999.4, "999"),
        (999.5, "1.00k"),
        (1234, "1.23k"),
        (49_122_681_728, "49.1G"),
        (671.9e9, "672G"),
        (2e18, "2000P"),
    ],
)
def test_amount_keeps_three_digits(value: float, text: str) -> None:
    assert amount(value) == text


def test_parameters_count_in_billions_and_bytes_in_giga() -> None:
    assert amount(30.5e9, thousand="K", billion="B") == "30.5B"
    assert quantity(98.2e9, "B") == "98.2 GB"
    assert quantity(144, "B") == "144 B"


def test_contexts_are_told_in_k_where_they_are_whole() -> None:
    assert [tokens(count) for count in (4096, 131072, 1000, 5000)] == ["4k", "128k", "1,000", "5,000"]
