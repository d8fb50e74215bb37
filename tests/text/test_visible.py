"""Control characters of a model's making."""

from __future__ import annotations

from firstlight.text.visible import visible


def test_control_characters_are_replaced_and_text_is_not() -> None:
    assert visible("a\x1b[2Jb\x00\x7f\x9b") == "a\ufffd[2Jb\ufffd\ufffd\ufffd"
    assert visible("tab\tline\nZ\u00fcrich \u6771\u4eac \U0001f305") == "tab\tline\nZ\u00fcrich \u6771\u4eac \U0001f305"
