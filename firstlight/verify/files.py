"""Writes a report whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from firstlight.errors import FirstlightError


def check_writable(path: Path) -> None:
    """Check that a report could be written, before hours are spent on it. Raises: FirstlightError."""
    if path.is_dir():
        raise FirstlightError(
            "cannot write the report",
            where=str(path),
            why="it is a folder",
            fix=f"give a file, such as {path}/report.html",
        )
    if not path.parent.is_dir():
        raise FirstlightError(
            "cannot write the report",
            where=str(path),
            why=f"there is no folder {path.parent}",
            fix=f"mkdir -p {path.parent}",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _failed(path, f"no permission to write in {path.parent}")


def write_report(path: Path, text: str) -> None:
    """Write text to a file; an older one stays as it was unless all is written. Raises: FirstlightError."""
    check_writable(path)
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
    except OSError as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        raise _failed(path, error.strerror or str(error)) from None


def _failed(path: Path, why: str) -> FirstlightError:
    return FirstlightError(
        "cannot write the report", where=str(path), why=why, fix="free some space, or name another place with --output"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
