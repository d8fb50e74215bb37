"""A checkpoint folder: names, shapes and dtypes at once, values only when asked for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from torch import Tensor

from firstlight.errors import FirstlightError
from firstlight.spec.names import Candidate
from firstlight.weights.shards import Header, Shard, locate, map_shard, read_headers, shown, unreadable

DTYPES = ("F32", "F16", "BF16")
"""Formats in which weights are accepted; anything else needs scales that no one would apply."""


def part_shape(shape: tuple[int, ...], candidate: Candidate) -> tuple[int, ...] | None:
    """Return the shape of the part that a candidate takes of a tensor, None if there is no such part."""
    source = candidate.source
    if candidate.expert is not None:
        if not shape or candidate.expert >= shape[0]:
            return None
        shape = shape[1:]
    if source.transpose:
        if len(shape) < 2:
            return None
        shape = (*shape[:-2], shape[-1], shape[-2])
    if source.chunk:
        if not shape or shape[0] % source.chunk[1]:
            return None
        shape = (shape[0] // source.chunk[1], *shape[1:])
    return shape


def _rows(total: int, candidate: Candidate) -> slice:
    if candidate.source.chunk is None:
        return slice(None)
    k, n = candidate.source.chunk
    return slice(k, None, n) if candidate.source.interleave else slice(k * total // n, (k + 1) * total // n)


class Checkpoint:
    """The tensors of a folder. notices: what was seen and passed over."""

    def __init__(self, folder: Path, headers: dict[str, Header], notices: tuple[str, ...]) -> None:
        self.folder = folder
        self.notices = notices
        self._headers = headers
        self._mapped: dict[Path, Shard] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Return the checkpoint in a folder; reads the headers of all shards and no weights.

        Raises: FirstlightError if files are absent, damaged, unreadable or contradict the index.
        """
        try:
            layout = locate(folder)
        except OSError as fault:
            raise unreadable(Path(fault.filename or folder), fault) from fault
        headers, unindexed = read_headers(layout)
        notices = [f"{file} is not used: the index does not name it" for file in layout.stray]
        if layout.weight_map is None:
            notices = [f"{file} is not used: {layout.shards[0]} has the weights" for file in layout.stray]
        if unindexed:
            notices.append(f"{len(unindexed)} tensors are not used, the index does not name them: {shown(unindexed)}")
        return cls(folder, headers, tuple(notices))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop the mappings, and with them the pages read so far; a later read maps its shard again."""
        self._mapped.clear()

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._headers)

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._headers[name].shape

    def dtype(self, name: str) -> str:
        """Return the stored format of a tensor as the file spells it, such as "BF16"."""
        return self._headers[name].dtype

    def read(self, candidate: Candidate) -> Tensor:
        """Return the part that a candidate names: a view of the mapped file, its pages read when used.

        Raises: FirstlightError if the format is not one of DTYPES; ValueError if there is no such part.
        """
        header = self._headers[candidate.name]
        if header.dtype not in DTYPES:
            raise FirstlightError(
                f"weights stored as {header.dtype} are not supported",
                where=f"{header.shard}: {candidate.name}",
                why=f"weights must be one of {', '.join(DTYPES)}",
                fix="use a checkpoint that is not quantised",
            )
        if part_shape(header.shape, candidate) is None:
            raise ValueError(f"{candidate.name} of shape {list(header.shape)} has no part {candidate}")
        view = self._shard(header.shard).get_slice(candidate.name)
        tensor = view[...] if candidate.expert is None else view[candidate.expert]
        if candidate.source.transpose:
            tensor = tensor.transpose(-1, -2)
        return tensor[_rows(tensor.shape[0], candidate)] if candidate.source.chunk else tensor

    def _shard(self, path: Path) -> Shard:
        if path not in self._mapped:
            self._mapped[path] = map_shard(path)
        return self._mapped[path]
