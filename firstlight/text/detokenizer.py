"""Incremental detokenizer: ids in, text out as soon as it is final."""

from __future__ import annotations

from firstlight.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the ids of one stream into pieces of text whose concatenation is `tokenizer.decode(ids)`.

    A piece never ends inside a character: bytes wait until the character is complete, or until
    `flush` at the end of the stream. The ids of the last piece are decoded again with the next
    one, because a decoder may treat the start of a text differently (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._last: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that became final with this id, often empty."""
        if not self._tokenizer.is_visible(token, skip_special_tokens=self._skip):
            return ""
        self._pending.append(token)
        # a byte that follows could still make the whole run of bytes invalid
        if token in self._tokenizer.backend.byte_tokens:
            return ""
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._last, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the rest of the stream, unfinished characters as U+FFFD, and start anew."""
        text = self._new_text()
        self._last, self._pending = [], []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._last)
        return self._decode(self._last + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
