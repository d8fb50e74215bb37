"""Reports are written whole or not at all. A full disk is in tests/cli/test_bad_input.py."""

from __future__ import annotations

import os
import stat
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


@pytest.mark.parametrize("kept", ["text", None])
def test_a_report_through_a_link_is_written_to_its_target(tmp_path: Path, kept: str | None) -> None:
    target, link = tmp_path / "there" / "page.html", tmp_path / "link.html"
    target.parent.mkdir()
    if kept is not None:
        target.write_text(kept)
    link.symlink_to(target)
    write_report(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_that_is_full_says_so_and_stays_a_device(tmp_path: Path) -> None:
    # through a link, so that a fault of ours cannot harm the machine's own device
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(FirstlightError) as refused:
        write_report(link, "text")
    assert "No space left" in refused.value.why
    assert link.is_symlink()
    assert link.is_char_device()


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FirstlightError):
        check_writable(tmp_path / ("x" * 300) / "page")
