"""What a model writes, made fit to be shown: its control characters could steer a terminal or break a page."""

from __future__ import annotations

import unicodedata

REPLACEMENT = "\ufffd"


def visible(text: str) -> str:
    """Return text with every control character but line feed and tab as U+FFFD."""
    return "".join(REPLACEMENT if unicodedata.category(mark) == "Cc" and mark not in "\n\t" else mark for mark in text)
