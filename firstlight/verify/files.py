"""Writes a report whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from firstlight.errors import FirstlightError


def check_writable(path: Path) -> None:
    """Check that a report could be written, before hours are spent on it. Raises: FirstlightError."""
    try:
        _check(path)
    except (OSError, RuntimeError) as error:
        raise _failed(path, getattr(error, "strerror", None) or str(error)) from None


def _check(path: Path) -> None:
    if path.is_dir():
        raise FirstlightError(
            "cannot write the file",
            where=str(path),
            why="it is a folder",
            fix=f"give a file, such as {path}/report.html",
        )
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise _failed(path, "no permission to write to it")
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise FirstlightError(
            "cannot write the file",
            where=str(path),
            why=f"there is no folder {folder}",
            fix=f"mkdir -p {folder}",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _failed(path, f"no permission to write in {folder}")


def write_report(path: Path, text: str) -> None:
    """Write text to a file; an older one stays as it was unless all is written. Raises: FirstlightError.

    A device or pipe is written to; a link stays, and its target is the file.
    """
    check_writable(path)
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise _failed(path, error.strerror or str(error)) from None


def _replace(path: Path, text: str) -> None:
    draft: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            draft = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o666 & ~_umask())
        os.replace(draft, path)
    except OSError:
        if draft is not None:
            draft.unlink(missing_ok=True)
        raise


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _failed(path: Path, why: str) -> FirstlightError:
    return FirstlightError(
        "cannot write the file", where=str(path), why=why, fix="free some space, or name another place"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
