"""Markdown from code: tables, signatures, and what a docstring says of each field of a class."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cached_property
from types import ModuleType, UnionType
from typing import Any, get_args

from pages.glossary import FIELDS

KEY = r"(?<![\w.])({key}(?:(?:, | and )\w+)*)(?: (?:None|True|False|0|\"\w+\"|\(\w+(?:, \w+)*\)))?: "
# a sentence that begins with a word and a colon speaks of something else
OTHER = re.compile(r"(?<=\.) (?=\w+(?:, \w+)*(?: \w+)?: )")


def escaped(text: str) -> str:
    """Return text in which no character is markup but the backquote."""
    pieces = text.split("`")
    plain = [re.sub(r"([*|<>\[\]])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(
        part for pair in zip(plain, [f"`{code}`" for code in pieces[1::2]] + [""], strict=True) for part in pair
    )


def code(text: str) -> str:
    """Return text as code that may stand in a table."""
    if "|" not in text:
        return f"`{text}`"
    # as HTML: a bar between backquotes is read as the end of a cell, or shown with its backslash
    return "<code>" + re.sub(r"[|<>&*\[\]`]", lambda found: f"&#{ord(found[0])};", text) + "</code>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def fence(text: str, language: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown; its indented lines stay as they are."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    return "\n".join(line if line.startswith("    ") else escaped(line) for line in lines)


def rest(docstring: str | None) -> str:
    """Return all of a docstring on one line."""
    return escaped(" ".join(inspect.cleandoc(docstring or "").split()))


def signature(function: Callable[..., Any]) -> str:
    """Return the parameters and the result of a function as they are written, without self or cls."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef), f"{function} is not a function"
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(arguments)}){result}"


def public_members(module: ModuleType) -> dict[str, Any]:
    """Return what a module defines and does not hide, in the order of its text."""
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a docstring."""
    return escaped(inspect.cleandoc(function.__doc__ or "").split("\n", 1)[0])


class Noun:
    """A class of the vocabulary: what its docstring says as a whole, and of each field."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    @cached_property
    def fields(self) -> tuple[Field[Any], ...]:
        """The fields of a dataclass, none of another class."""
        return fields(self.cls) if is_dataclass(self.cls) else ()

    def _keys(self) -> dict[str, str]:
        """Return the words that a description may begin with, each with its field: names, and words it may be."""
        keys: dict[str, str] = {}
        for field in self.fields:
            for word in re.findall(r"'(\w+)'|\"(\w+)\"", str(field.type)):
                keys.setdefault(word[0] or word[1], field.name)
        return keys | {field.name: field.name for field in self.fields}

    @cached_property
    def described(self) -> dict[str, str]:
        """What the docstring says of each field; a field it does not speak of is absent."""
        keys, found = self._keys(), {}
        text = inspect.cleandoc(self.cls.__doc__ or "")
        for paragraph in text.split("\n\n"):
            line = " ".join(paragraph.split())
            pattern = KEY.format(key=f"(?:{'|'.join(sorted(keys, key=len, reverse=True))})") if keys else r"(?!)"
            starts = list(re.finditer(pattern, line))
            ends = [match.start() for match in starts[1:]] + [len(line)]
            for match, after in zip(starts, ends, strict=False):
                said = OTHER.split(line[match.start() : after])[0].strip()
                for word in re.findall(r"\w+", match[1]):
                    if word in keys:
                        name = keys[word]
                        plain = word == name and match[0] == f"{match[1]}: "
                        said_of = said[match.end() - match.start() :] if plain else said
                        if said_of not in found.get(name, ""):
                            found[name] = f"{found[name]} {said_of}" if name in found else said_of
        sentences = re.split(r"(?<=[.;])\s+", " ".join(text.split()))
        for field in self.fields:
            told = FIELDS.get(f"{self.cls.__name__}.{field.name}")
            if told and (field.name not in found or f"{field.name} " in found[field.name]):
                found[field.name] = "; ".join(filter(None, (told, found.get(field.name))))
            elif field.name not in found:
                spoken = [s for s in sentences if re.search(rf"(?<!\w){field.name}(?!\w)", s)]
                found |= {field.name: spoken[0]} if spoken else {}
        return found

    def undescribed(self) -> list[str]:
        """Return the public fields that the docstring does not speak of."""
        return [f.name for f in self.fields if not f.name.startswith("_") and f.name not in self.described]

    def field_table(self) -> str:
        """Return the fields with type, default and description."""
        rows = []
        for field in self.fields:
            if not field.name.startswith("_"):
                said = escaped(self.described.get(field.name, ""))
                rows.append((code(field.name), code(str(field.type)), default(field), said))
        return table(("field", "type", "default", ""), rows) if rows else ""

    def methods(self) -> Iterator[tuple[str, str, str]]:
        """Yield (kind, signature, docstring) of public methods and properties, in the order of the text."""
        for name, kind in vars(self.cls).get("__annotations__", {}).items():
            if "ClassVar" in str(kind) and not name.startswith("_") and name not in vars(self.cls):
                yield "attribute to set", f"{name}: {kind}", ""
        for name, member in vars(self.cls).items():
            if name.startswith("_"):
                continue
            if isinstance(member, (property, cached_property)):
                function = member.fget if isinstance(member, property) else member.func
                yield "property", name, rest(member.__doc__ or function.__doc__)
            elif inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)):
                function = member if inspect.isfunction(member) else member.__func__
                abstract = getattr(function, "__isabstractmethod__", False)
                yield "to write" if abstract else "method", signature(function), rest(function.__doc__)

    def section(self, level: int = 3, *, methods: bool = True) -> str:
        """Return a section with the docstring, the fields, and the methods."""
        name = self.cls.__name__
        parts = [f"{'#' * level} `{name}`", prose(self.cls.__doc__), self.field_table()]
        rows = [(code(said), escaped(kind), text) for kind, said, text in self.methods()] if methods else []
        if rows:
            parts.append(table(("name", "", ""), rows))
        return "\n\n".join(part for part in parts if part)


def default(field: Field[Any]) -> str:
    """Return the default of a field, or that it must be given."""
    if field.default is not MISSING:
        return code(field.default.__name__ if inspect.isfunction(field.default) else repr(field.default))
    return "required" if field.default_factory is MISSING else code(repr(field.default_factory()))


def function_rows(functions: Iterable[Callable[..., Any]]) -> list[tuple[str, str]]:
    """Return rows of signature and docstring."""
    return [(code(signature(function)), rest(function.__doc__)) for function in functions]


def union(value: object) -> str:
    """Return the choices of a union of classes, "" if it is none."""
    if not isinstance(value, UnionType):
        return ""
    return ", ".join(f"`{arg.__name__}`" for arg in get_args(value))
