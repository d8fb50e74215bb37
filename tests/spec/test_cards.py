"""The shipped config cards."""

from __future__ import annotations

import pytest

from firstlight.errors import FirstlightError
from firstlight.models.declare import read_arch
from firstlight.models.registry import find_port
from firstlight.spec.cards import card, card_names


def test_cards_are_named_by_their_file() -> None:
    assert card_names() == ("deepseek-v3.2", "glm-5.3-flash", "kimi-linear-48b-a3b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", card_names())
def test_every_card_is_read_without_unknown_keys(name: str) -> None:
    raw = card(name)
    arch, unknown = read_arch(raw, find_port(raw["model_type"]))
    assert unknown == ()
    assert arch.dtype == "bfloat16"


def test_a_card_is_a_fresh_copy() -> None:
    card("qwen3-30b-a3b")["hidden_size"] = 1
    assert card("qwen3-30b-a3b")["hidden_size"] == 2048


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(FirstlightError, match="no config card 'kimi-linear-48b'") as caught:
        card("kimi-linear-48b")
    assert caught.value.fix == "did you mean kimi-linear-48b-a3b?"


@pytest.mark.parametrize("name", ["README.md", "../configs/qwen3-30b-a3b", "qwen3-30b-a3b.json", ""])
def test_only_names_of_cards_are_opened(name: str) -> None:
    with pytest.raises(FirstlightError, match="no config card"):
        card(name)
