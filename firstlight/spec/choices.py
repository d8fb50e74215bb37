"""Refuses what a field of a noun does not know: a port file is Python that no type checker has read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_choices(noun: object) -> None:
    """Check every field of a dataclass that is typed Literal. Raises: ValueError with the words it knows."""
    for name, hint in get_type_hints(type(noun)).items():
        if get_origin(hint) is Literal and getattr(noun, name) not in get_args(hint):
            words = " or ".join(map(repr, get_args(hint)))
            raise ValueError(f"{type(noun).__name__}.{name} must be {words}, got {getattr(noun, name)!r}")


def misfits(noun: Any, path: str = "") -> Iterator[str]:
    """Yield every field of a noun, and of those inside it, that holds another type than it is declared with.

    Fields of nouns outside the vocabulary are looked at where their annotations can be resolved.
    """
    try:
        hints = get_type_hints(type(noun))
    except NameError:
        return
    for name in (field.name for field in fields(noun)):
        yield from _of_value(getattr(noun, name), hints[name], f"{path}.{name}".lstrip("."))


def _of_value(value: Any, hint: Any, path: str) -> Iterator[str]:
    if not _fits(value, hint):
        yield f"{path} must be {_spelt(hint)}, got {type(value).__name__} {value!r:.40}"
    elif isinstance(value, tuple):
        inner = get_args(hint)
        for index, item in enumerate(value):
            yield from _of_value(item, inner[0] if inner else Any, f"{path}[{index}]")
    elif is_dataclass(value):
        yield from misfits(value, path)


def _fits(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _spelt(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(map(_spelt, get_args(hint)))
    if kind is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
