"""Refuses a word that a field of a noun does not know: a port file is Python that no type checker has read."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints


def check_choices(noun: object) -> None:
    """Check every field of a dataclass that is typed Literal. Raises: ValueError with the words it knows."""
    for name, hint in get_type_hints(type(noun)).items():
        if get_origin(hint) is Literal and getattr(noun, name) not in get_args(hint):
            words = " or ".join(map(repr, get_args(hint)))
            raise ValueError(f"{type(noun).__name__}.{name} must be {words}, got {getattr(noun, name)!r}")
