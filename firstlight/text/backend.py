"""The libraries a tokenizer can run on: `tokenizers` for tokenizer.json, transformers for every other format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from firstlight.errors import FirstlightError

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Backend(Protocol):
    """What a Tokenizer needs of a library. vocab: every token's id; special: ids that are no text."""

    vocab: dict[str, int]
    special: frozenset[int]
    byte_tokens: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""


class FastBackend:
    """The `tokenizers` library.

    byte_tokens: ids of a byte-fallback vocabulary. Its decoder judges a run of them as a whole: one
    invalid byte turns all of the run into replacement characters.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        # a file may ask for a maximum length or for padding, which served one training run
        library.no_truncation()
        library.no_padding()
        self.library = library
        self.vocab = library.get_vocab(with_added_tokens=True)
        self.special = frozenset(i for i, token in library.get_added_tokens_decoder().items() if token.special)
        falls_back = library.decoder is not None and b'"ByteFallback"' in library.decoder.__getstate__()
        self.byte_tokens = frozenset(i for token, i in self.vocab.items() if falls_back and BYTE_TOKEN.fullmatch(token))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; the file's post-processor adds what it adds."""
        return list(self.library.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        return str(self.library.decode(list(ids), skip_special_tokens=skip_special_tokens))


class SlowBackend:
    """A tokenizer that exists only as Python in transformers."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.vocab: dict[str, int] = library.get_vocab()
        self.special = frozenset(library.all_special_ids)
        self.byte_tokens: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        return list(self.library.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids, spaces as they are."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.library.decode(list(ids), **options))


def load_fast(path: Path) -> FastBackend:
    """Return the backend of a tokenizer.json. Raises: FirstlightError if it cannot be read."""
    try:
        # read here: the library's own message for an absent or foreign file names neither file nor cause
        return FastBackend(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except Exception as error:
        # the library raises a bare Exception for anything it cannot parse
        raise FirstlightError(
            "cannot read the tokenizer",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="download the file again, or pip install -U tokenizers",
        ) from error


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_other(folder: Path) -> Backend:
    """Return the backend that transformers makes of a folder without tokenizer.json. Raises: FirstlightError."""
    try:
        import transformers
    except ImportError:
        raise FirstlightError(
            "no tokenizer.json",
            where=str(folder),
            why="other tokenizer formats are read through transformers, which is not installed",
            fix="pip install transformers, or add a tokenizer.json to the folder",
        ) from None
    try:
        # it warns of every model_type that it does not know
        with _silent(transformers.logging):
            library = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # anything can come out of the conversion of a foreign format
        cause = (str(error).splitlines() or [""])[0]
        raise FirstlightError(
            "no tokenizer that can be read",
            where=str(folder),
            why=f"no tokenizer.json, and transformers says {type(error).__name__}: {cause}",
            fix="add the tokenizer files of the release, best a tokenizer.json",
        ) from error
    fast = getattr(library, "backend_tokenizer", None)
    return FastBackend(fast) if isinstance(fast, tokenizers.Tokenizer) else SlowBackend(library)
