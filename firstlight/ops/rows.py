"""The rows of one step: which tokens [start, start + n) of which sequence, flattened into one token axis.

T tokens of all rows one after another, R rows. There is no prefill or decode phase: a row has
history iff its start > 0, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Row metadata, on the host (starts, lengths) and on the device (the tensors)."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions_T: Tensor
    row_T: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: list[tuple[int, int]], device: str | torch.device = "cpu") -> Rows:
        """Build from (start, n) pairs; n may be 0. Raises: ValueError on a negative number."""
        if any(start < 0 or n < 0 for start, n in rows):
            raise ValueError(f"rows must be (start >= 0, n >= 0), got {rows}")
        positions = [start + i for start, n in rows for i in range(n)]
        owner = [r for r, (_, n) in enumerate(rows) for _ in range(n)]
        offsets = [0]
        for _, n in rows:
            offsets.append(offsets[-1] + n)
        return cls(
            tuple(start for start, _ in rows),
            tuple(n for _, n in rows),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(owner, dtype=torch.int64, device=device),
            torch.tensor(offsets, dtype=torch.int32, device=device),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def is_decode(self) -> bool:
        """True if no row has more than one token: chooses the stage of the Plan, never the maths."""
        return all(n <= 1 for n in self.lengths)

    def spans(self) -> Iterator[tuple[int, int, int, slice]]:
        """Yield (row, start, n, slice of the token axis) of every row, empty ones included."""
        begin = 0
        for row, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True)):
            yield row, start, n, slice(begin, begin + n)
            begin += n
