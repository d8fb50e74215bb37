"""Config cards: configurations of public models that ship with the package, without weights."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from firstlight.errors import FirstlightError, closest

FOLDER = ("data", "configs")
SUFFIX = ".json"


def card_names() -> tuple[str, ...]:
    """Return the names of the shipped cards, sorted."""
    found = (entry.name for entry in files("firstlight").joinpath(*FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX)))


def card(name: str) -> dict[str, Any]:
    """Return the config.json of a card, a fresh copy. Raises: FirstlightError for an unknown name."""
    if name not in card_names():
        near = closest(name, card_names())
        raise FirstlightError(
            f"no config card {name!r}",
            why=f"cards: {', '.join(card_names())}",
            fix=f"did you mean {near}?" if near else "give a folder or a config.json",
        )
    text = files("firstlight").joinpath(*FOLDER, name + SUFFIX).read_text(encoding="utf-8")
    raw: dict[str, Any] = json.loads(text)
    return raw
