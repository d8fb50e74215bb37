"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError


def load_json(path: Path, *, fix: str = "download the file again") -> dict[str, Any]:
    """Return the object in a JSON file. fix: what helps where it is broken.

    Raises: FirstlightError if absent, unreadable, broken or not an object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FirstlightError(
            f"no {path.name}",
            where=str(path),
            why="a model folder holds config.json and safetensors",
            fix="check the path",
        ) from None
    except OSError as error:
        raise FirstlightError(
            f"cannot read {path.name}",
            where=str(path),
            why=error.strerror or str(error),
            fix=f"give this user read access to {path}",
        ) from None
    except (ValueError, RecursionError) as error:
        raise FirstlightError(f"{path.name} is not valid JSON", where=str(path), why=str(error), fix=fix) from None
    if not isinstance(raw, dict):
        raise FirstlightError(
            f"{path.name} holds {type(raw).__name__}, not an object",
            where=str(path),
            why="keys and their values are read from it: {...}",
            fix=fix,
        )
    return raw
