"""Chat template: messages to prompt text, by the Jinja template of the model folder. Never a foreign default."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firstlight.errors import FirstlightError
from firstlight.text.tokenizer import read_optional, special_tokens

Message = Mapping[str, Any]
# what an expression of a template can raise when it is run on messages it was not written for
RENDER_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's templates by name, "default" the usual one, and the special tokens they may name."""

    sources: dict[str, str]
    tokens: dict[str, str]
    where: str

    @classmethod
    def load(cls, folder: Path, *, file: Path | None = None) -> ChatTemplate:
        """Return the template in `file`, else in the folder: chat_template.jinja, else tokenizer_config.json.

        Raises: FirstlightError if there is none, or if one is not valid Jinja.
        """
        path = file or folder / "chat_template.jinja"
        if file is not None or path.is_file():
            sources, where = {"default": read_text(path)}, str(path)
        else:
            config = folder / "tokenizer_config.json"
            where = f"{config}  chat_template"
            sources = named_sources(read_optional(config).get("chat_template"), where=where)
        if not sources:
            raise FirstlightError(
                "the model has no chat template",
                where=str(folder),
                why="neither chat_template.jinja nor a chat_template in tokenizer_config.json",
                fix="--chat-template FILE, or send a plain completion",
            )
        for source in sources.values():
            compiled(source, where)
        return cls(sources=sources, tokens=special_tokens(folder), where=where)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. variables: further names that the template knows, such as enable_thinking.

        Raises: FirstlightError with the template's own words where it refuses the messages.
        """
        template = compiled(self._source(with_tools=bool(tools)), self.where)
        # a null field means an absent one; templates would print "None"
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        names = {**self.tokens, "tools": list(tools) if tools else None, "documents": None, **(variables or {})}
        names |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(names)
        except RENDER_ERRORS as error:
            raise FirstlightError(
                "the chat template refused the messages",
                where=self.where,
                why=f"{type(error).__name__}: {error}",
                fix="change the messages, or --chat-template FILE",
            ) from error

    def _source(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise FirstlightError(
                "the model has no default chat template",
                where=self.where,
                why=f"its templates are named {', '.join(sorted(self.sources))}",
                fix="--chat-template FILE",
            )
        return self.sources[name]


def read_text(path: Path) -> str:
    """Return a template file's text. Raises: FirstlightError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise FirstlightError("cannot read the chat template", where=str(path), why=why, fix="check the path") from None


def named_sources(value: Any, *, where: str) -> dict[str, str]:
    """Return name -> template of a "chat_template" entry: text, or a list of {name, template}.

    Raises: FirstlightError for anything else.
    """
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    found = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if len(found) < len(entries) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        what = "chat_template must be text or a list of {name, template}"
        raise FirstlightError(what, where=where, fix="--chat-template FILE")
    return {str(name): str(text) for name, text in found.items()}


@lru_cache(maxsize=32)
def compiled(source: str, where: str) -> Template:
    """Return the compiled template. Raises: FirstlightError with the line where it is not valid Jinja."""
    try:
        return environment().from_string(source)
    except TemplateSyntaxError as error:
        raise FirstlightError(
            "the chat template is not valid Jinja",
            where=f"{where}  line {error.lineno} of the template",
            why=error.message or "syntax error",
            fix="--chat-template FILE with a repaired copy",
        ) from error


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that released templates are written for."""
    extensions = [GenerationBlock, loopcontrols]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    helpers: dict[str, Callable[..., object]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    env.globals.update(helpers)
    return env


class GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training: its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as written in prompts: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse the messages, from inside a template."""
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """Return the local time in a strftime form."""
    return datetime.now().strftime(form)
