"""Python text of a declaration: calls by keyword, each argument under the comments that say where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GUESS, TODO = "# guess: ", "# todo: "
WIDTH = 116


@dataclass(frozen=True, slots=True)
class Value:
    """Code of one argument. guess: the evidence it was derived from, where neither config nor shape fixes it.

    todo: what a person has to settle.
    """

    code: str | Call
    guess: str = ""
    todo: str = ""


@dataclass(slots=True)
class Call:
    """A call by keyword, rendered one argument a line where it holds comments or is long."""

    noun: str
    args: dict[str, Value] = field(default_factory=dict)

    def set(self, name: str, value: Value | Call | str | int | float | bool | None) -> Call:
        """Set an argument and return the call."""
        if not isinstance(value, Value):
            value = Value(value if isinstance(value, (str, Call)) else repr(value))
        self.args[name] = value
        return self

    def unless(self, default: str, name: str, value: Value) -> Call:
        """Set an argument that differs from the field's default, and return the call."""
        return self if value.code == default and not value.guess else self.set(name, value)

    def lines(self, indent: int = 0) -> list[str]:
        """Return the text, without indent before the first line."""
        flat = self._flat()
        if flat is not None and len(flat) + indent <= WIDTH:
            return [flat]
        pad, found = " " * (indent + 4), [f"{self.noun}("]
        for name, value in self.args.items():
            found += comments(value, pad)
            code = value.code.lines(indent + 4) if isinstance(value.code, Call) else [value.code]
            code[0] = f"{pad}{name}={code[0]}"
            code[-1] += ","
            found += code
        return [*found, " " * indent + ")"]

    def _flat(self) -> str | None:
        words = []
        for name, value in self.args.items():
            code = value.code._flat() if isinstance(value.code, Call) else value.code
            if value.guess or value.todo or code is None:
                return None
            words.append(f"{name}={code}")
        return f"{self.noun}({', '.join(words)})"


def comments(value: Value, pad: str) -> list[str]:
    """Return the comment lines above an argument or statement."""
    found = wrapped(GUESS + value.guess, pad) if value.guess else []
    return found + (wrapped(TODO + value.todo, pad) if value.todo else [])


def wrapped(text: str, pad: str) -> list[str]:
    """Return a comment cut to lines; the later ones begin with a plain #."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(pad) + len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("#  ")
        lines[-1] += (" " if lines[-1] else "") + word
    return [pad + line for line in lines]


def mapping(before: str, items: Mapping[str, str], after: str) -> list[str]:
    """Return a statement around a dict of word -> code, one entry a line where it is long."""
    entries = [f"{quoted(word)}: {code}" for word, code in items.items()]
    flat = f"{before}{{{', '.join(entries)}}}{after}"
    if len(flat) + 4 <= WIDTH:
        return [flat]
    return [f"{before}{{", *(f"    {entry}," for entry in entries), f"}}{after}"]


def quoted(word: object) -> str:
    """Return a literal as code, text in double quotes."""
    if isinstance(word, list):
        return f"[{', '.join(map(quoted, word))}]"
    if isinstance(word, float) and math.isinf(word):
        return f'float("{word}")'
    if not isinstance(word, str):
        return repr(word)
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def tuple_code(items: Sequence[object]) -> str:
    """Return a tuple as code."""
    inner = ", ".join(str(item) for item in items)
    return f"({inner},)" if len(items) == 1 else f"({inner})"
