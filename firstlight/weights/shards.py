"""Which files of a folder hold the weights, and what their headers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import EllipsisType
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from firstlight.errors import FirstlightError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 8
"""Names listed in a message before the rest is only counted."""


class Slice(Protocol):
    """A tensor of a shard; indexing gives a view of the mapped file."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: EllipsisType | int) -> Tensor: ...


class Shard(Protocol):
    """An open weight file: what is used of safetensors.safe_open, which has no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Slice: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One tensor as the header of its shard describes it."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The weight files of a folder, by name. weight_map: tensor -> file, None without an index."""

    folder: Path
    shards: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    stray: tuple[str, ...]


def shown(names: list[str] | tuple[str, ...]) -> str:
    """Return the first names as text, with a count of those left out."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def unreadable(path: Path, fault: OSError) -> FirstlightError:
    """Return the error for a file or folder that the system does not let us read."""
    if isinstance(fault, PermissionError):
        what, fix = f"no permission to read {path.name}", f"give this user read access to {path}"
    else:
        what, fix = f"cannot read {path.name}", "check the disk or copy the file again"
    return FirstlightError(what, where=str(path), why=fault.strerror or str(fault), fix=fix)


def locate(folder: Path) -> Layout:
    """Return the weight files of a folder; an index decides if there is one.

    Raises: FirstlightError if the folder or one of the files cannot be used.
    """
    if not folder.exists():
        raise FirstlightError("no such checkpoint folder", where=str(folder), fix="check the path")
    if not folder.is_dir():
        raise FirstlightError(
            "a checkpoint is a folder, this is a file",
            where=str(folder),
            why="config.json, the tokenizer and all shards are read from one folder",
            fix=f"give {folder.parent}",
        )
    present = sorted(path.name for path in folder.iterdir())
    weight_map = _read_index(folder / INDEX) if INDEX in present else None
    if weight_map is None and SINGLE not in present:
        raise _no_weights(folder, present)
    names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    folders = [name for name in names if (folder / name).is_dir()]
    if folders:
        raise FirstlightError(
            f"{folders[0]} is a folder",
            where=str(folder / folders[0]),
            why="weights are read from a file of that name",
            fix="move the weights up out of it, or download them again",
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FirstlightError(
            f"{len(absent)} of {len(names)} weight files absent: {shown(absent)}",
            where=str(folder if weight_map is None else folder / INDEX),
            why="every shard named by the index is needed" if weight_map else "the link leads nowhere",
            fix="download the absent files",
        )
    stray = tuple(name for name in present if name.endswith(".safetensors") and name not in names)
    return Layout(folder=folder, shards=tuple(names), weight_map=weight_map, stray=stray)


def _no_weights(folder: Path, present: list[str]) -> FirstlightError:
    stray = [name for name in present if name.endswith(".safetensors")]
    pickles = [name for name in present if name.endswith((".bin", ".pt", ".pth"))]
    why = f"neither {SINGLE} nor {INDEX} is there"
    fix = "download the weights in safetensors format"
    if stray:
        why += f", only {shown(stray)}"
        fix = f"download {INDEX}, or rename a single file to {SINGLE}"
    elif pickles:
        why += f"; {shown(pickles)} can run code when opened, so pickles are not loaded"
        fix = "convert the weights to safetensors"
    return FirstlightError("no safetensors weights in the folder", where=str(folder), why=why, fix=fix)


def _read_index(path: Path) -> Mapping[str, str]:
    """Return tensor name -> shard file name."""

    def broken(why: str) -> FirstlightError:
        fix = f"download {INDEX} again"
        return FirstlightError("the index of the shards is broken", where=str(path), why=why, fix=fix)

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise broken(f"not JSON: {fault}") from fault
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise broken('"weight_map" must map tensor names to file names')
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise broken(f'"weight_map" gives no file name for {tensor}')
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise broken(f"{tensor} is said to be outside of the folder, in {shard}")
    return weight_map


def map_shard(path: Path) -> Shard:
    """Return the shard, mapped into memory; nothing but its header is read.

    Raises: FirstlightError if it cannot be read or is not whole.
    """
    try:
        # safe_open reports some system errors without their cause, open does not
        with path.open("rb") as file:
            start = file.read(64)
        return cast(Shard, safe_open(path, framework="pt"))
    except OSError as fault:
        raise unreadable(path, fault) from fault
    except SafetensorError as fault:
        if start.startswith(b"version https://git-lfs"):
            why, fix = "it is a Git LFS pointer, not the weights", "run git lfs pull in the folder"
        else:
            why, fix = f"header and size disagree: {fault}", "download it again and compare its size"
        what = f"weight file {path.name} is damaged or cut off"
        raise FirstlightError(what, where=str(path), why=why, fix=fix) from fault


def read_headers(layout: Layout) -> tuple[dict[str, Header], list[str]]:
    """Return the header of every tensor that counts, by name, and the tensors no index names.

    Raises: FirstlightError if the index and the shards disagree.
    """
    headers: dict[str, Header] = {}
    absent: list[str] = []
    unindexed: list[str] = []
    indexed: dict[str, set[str]] = {}
    for name, file in (layout.weight_map or {}).items():
        indexed.setdefault(file, set()).add(name)
    for file in layout.shards:
        shard = map_shard(layout.folder / file)
        held = set(shard.keys())
        named = indexed.get(file, held)
        absent += [f"{name} ({file})" for name in sorted(named - held)]
        unindexed += sorted(held - named)
        for name in sorted(named & held):
            view = shard.get_slice(name)
            headers[name] = Header(shard=layout.folder / file, shape=tuple(view.get_shape()), dtype=view.get_dtype())
    if absent:
        raise FirstlightError(
            f"{len(absent)} tensors are not in the shard that the index names",
            where=str(layout.folder / INDEX),
            why=shown(absent),
            fix=f"download {INDEX} and the shards again, from the same revision",
        )
    return headers, unindexed
