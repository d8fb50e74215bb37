"""Stop strings in a stream of text: an exact cut, and nothing shown that could still become a stop."""

from __future__ import annotations

from collections.abc import Sequence


class _Prefix:
    """How much of one stop the text so far ends in, kept up to date a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop, self.length = stop, 0
        # fallback[n]: the longest shorter prefix that the first n characters end in (Knuth, Morris, Pratt)
        self._fallback = [0, 0]
        for char in stop[1:]:
            self._fallback.append(self._longer(self._fallback[-1], char))

    def push(self, char: str) -> bool:
        """Return whether this character completes the stop."""
        length = self._fallback[self.length] if self.length == len(self.stop) else self.length
        self.length = self._longer(length, char)
        return self.length == len(self.stop)

    @property
    def open_length(self) -> int:
        """Characters at the end of the text that more text could make a stop of."""
        return self._fallback[self.length] if self.length == len(self.stop) else self.length

    def _longer(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length]
        return length + (self.stop[length] == char)


class StopChecker:
    """Cuts one stream of text at the stop that is complete first, of those complete at once the first given.

    matched: that stop, None so far. What a stop could still be made of is held back, so the text let
    out is the same however the stream is cut into pieces. include: the stop itself is let out too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop would match everywhere"
        self._prefixes = [_Prefix(stop) for stop in stops]
        self._include, self._held = include, ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop if one was found; what follows a stop is dropped.

        armed: False lets a stop that is complete within this text pass; its beginning still counts.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._prefixes:
            return text, None
        before, text = len(self._held), self._held + text
        for end in range(before, len(text)):
            complete = [prefix.stop for prefix in self._prefixes if prefix.push(text[end])]
            if complete and armed:
                self.matched, self._held = complete[0], ""
                return text[: end + 1 - (0 if self._include else len(self.matched))], self.matched
        free = len(text) - max(prefix.open_length for prefix in self._prefixes)
        self._held = text[free:]
        return text[:free], None

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        text, self._held = self._held, ""
        return text
