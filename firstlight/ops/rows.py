"""The rows of one step: which tokens [start, start + n) of which sequence, flattened into one token axis.

T tokens of all rows one after another, R rows. There is no prefill or decode phase: a row has
history iff its start > 0, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from firstlight.ops.groups import Group, partition, token_index

# (position, slot): the state after exactly `position` tokens is to be copied to that slot
Export = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Row metadata, on the host (starts, lengths, exports) and on the device (the tensors).

    groups: the same rows as dense batches, for bodies that compute many rows at once.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    positions_T: Tensor
    row_T: Tensor
    offsets: Tensor
    exports: tuple[Export, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[int, int]],
        device: str | torch.device = "cpu",
        *,
        exports: Sequence[Export] = (),
    ) -> Rows:
        """Build from (start, n) pairs; n may be 0. exports: empty, or one per row.

        Raises: ValueError on a negative number, or an export outside its row.
        """
        if any(start < 0 or n < 0 for start, n in rows):
            raise ValueError(f"rows must be (start >= 0, n >= 0), got {rows}")
        for (start, n), export in zip(rows, exports, strict=bool(exports)):
            if export is not None and not start < export[0] <= start + n:
                raise ValueError(f"export at position {export[0]} is outside the row ({start}, {n})")
        starts, lengths = tuple(start for start, _ in rows), tuple(n for _, n in rows)
        positions = [position for start, n in rows for position in range(start, start + n)]
        owner = [r for r, n in enumerate(lengths) for _ in range(n)]
        offsets = [0, *accumulate(lengths)]
        positions_T = torch.tensor(positions, dtype=torch.int64, device=device)
        row_T = torch.tensor(owner, dtype=torch.int64, device=device)
        offsets_R = torch.tensor(offsets, dtype=torch.int32, device=device)
        groups = _groups(starts, lengths, tuple(exports), offsets, positions_T, row_T)
        return cls(starts, lengths, positions_T, row_T, offsets_R, tuple(exports), groups)

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

    def pieces(self) -> Iterator[tuple[int, int, int, slice, int | None]]:
        """Yield (row, start, n, slice, slot) like `spans`, rows cut where a state is to be exported.

        slot: where a stateful operator copies the row's state after that piece, None for nowhere.
        """
        for row, start, n, tokens in self.spans():
            export = self.exports[row] if self.exports else None
            if export is None:
                yield row, start, n, tokens, None
                continue
            position, slot = export
            cut = position - start
            yield row, start, cut, slice(tokens.start, tokens.start + cut), slot
            if cut < n:
                yield row, position, n - cut, slice(tokens.start + cut, tokens.stop), None


def _groups(
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    exports: tuple[Export, ...],
    offsets: list[int],
    positions_T: Tensor,
    row_T: Tensor,
) -> tuple[Group, ...]:
    last, inner = {}, {}
    for row, export in enumerate(exports):
        if export is not None:
            position, slot = export
            cut = position - starts[row]
            if cut == lengths[row]:
                last[row] = slot
            else:
                inner[row] = (cut, slot)
    groups = []
    for rows in partition(starts, lengths, alone=inner.keys()):
        n = lengths[rows[0]]
        tokens = token_index(rows, n, offsets, row_T.device)
        position_Rn, row_Rn = (x_T[tokens].view(len(rows), n) for x_T in (positions_T, row_T))
        exported = tuple((index, last[row]) for index, row in enumerate(rows) if row in last)
        first = tuple(starts[row] for row in rows)
        groups.append(Group(first, n, tokens, row_Rn[:, 0], position_Rn, exported, inner.get(rows[0])))
    return tuple(groups)
