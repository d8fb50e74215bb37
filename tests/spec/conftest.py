"""Fixtures of the spec tests: declarations of cards and tiny models, sizes of their empty twins in transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
from reference_configs import CARDS, build_config, declare, empty_weights

from firstlight.spec.arch import ArchSpec
from firstlight.spec.cards import card


@pytest.fixture(scope="session")
def declared() -> Callable[[dict[str, Any]], ArchSpec]:
    """Return config.json -> ArchSpec."""
    return declare


@pytest.fixture(scope="session")
def card_arch() -> Callable[[str], ArchSpec]:
    """Return card name -> ArchSpec."""
    return cache(lambda name: declare(card(name)))


@pytest.fixture(scope="session")
def card_parameters() -> Callable[[str], int]:
    """Return card name -> parameters of its text model in transformers, all layers instantiated on the meta device."""

    @cache
    def count(name: str) -> int:
        config_class, model_class = CARDS[name]
        arguments = {key: value for key, value in card(name).items() if key not in ("model_type", "architectures")}
        return sum(map(prod, empty_weights(model_class, build_config(config_class, arguments)).values()))

    return count
