"""Tokenizer: text to ids and back, and which ids end a text. Knows nothing about models or chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.spec.files import load_json
from firstlight.text.backend import Backend, load_fast, load_other


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a model folder.

    eos_ids: ids that end a text, empty if no file names one. vocab_size: highest id + 1; a model's
    head may be padded beyond it, and those rows are no token.
    """

    backend: Backend
    eos_ids: tuple[int, ...]
    vocab_size: int
    known: frozenset[int]

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder: its tokenizer.json, else what transformers reads.

        Raises: FirstlightError if there is none that can be read.
        """
        path = folder / "tokenizer.json"
        backend = load_fast(path) if path.is_file() else load_other(folder)
        known = frozenset(backend.vocab.values())
        if not known:
            raise FirstlightError("the tokenizer has no tokens", where=str(path), fix="download the file again")
        return cls(backend=backend, eos_ids=read_eos_ids(folder, backend.vocab), vocab_size=max(known) + 1, known=known)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. add_special_tokens: what the file adds, such as a first token.

        False for a rendered chat template, which writes its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Ids of no token are passed over; invalid bytes become U+FFFD."""
        seen = [token for token in ids if self.is_visible(token, skip_special_tokens=skip_special_tokens)]
        return self.backend.decode(seen, skip_special_tokens=False)

    def is_visible(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """True if the id is a token that takes part in the text."""
        return token in self.known and not (skip_special_tokens and token in self.backend.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, None if there is no such token."""
        return self.backend.vocab.get(token)


def read_eos_ids(folder: Path, vocab: dict[str, int]) -> tuple[int, ...]:
    """Return the ids that end a text: of generation_config.json, else config.json, else tokenizer_config.json.

    Raises: FirstlightError if the first file that names any names something else than ids.
    """
    config = read_optional(folder / "config.json")
    text = config.get("text_config")
    tables = (
        ("generation_config.json", read_optional(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json  text_config", text if isinstance(text, dict) else {}),
    )
    for name, table in tables:
        if table.get("eos_token_id") is not None:
            return checked_ids(table["eos_token_id"], where=f"{folder / name}  eos_token_id")
    token = special_tokens(folder).get("eos_token")
    return (vocab[token],) if token in vocab else ()


def checked_ids(value: Any, *, where: str) -> tuple[int, ...]:
    """Return an id or a list of ids as a tuple. Raises: FirstlightError."""
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise FirstlightError(f"{value!r} is neither a token id nor a list of them", where=where)
    return tuple(ids)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the named tokens of tokenizer_config.json, such as {"bos_token": "<s>"}."""
    found = {}
    for key, value in read_optional(folder / "tokenizer_config.json").items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def read_optional(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises: FirstlightError if it is broken."""
    return load_json(path) if path.is_file() else {}
