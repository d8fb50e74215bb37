"""Reports are written whole or not at all. A full disk is in tests/cli/test_bad_input.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstlight.errors import FirstlightError
from firstlight.verify.files import check_writable, write_report


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    write_report(path, "\u00e9t\u00e9")
    assert path.read_text(encoding="utf-8") == "\u00e9t\u00e9"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_a_report_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_report(tmp_path / "report", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o640


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FirstlightError) as refused:
        check_writable(tmp_path / "report")
    assert "no permission to write" in refused.value.why
