"""Rows of equal length as one dense batch: what a body computes at once, histories padded to the longest.

R rows of n tokens each, S entries of the longest history. A step is a few groups: all its one-token rows
are usually one of them, and a long row is one by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# bounds R * n * S of a group of several rows, and with it every padded workspace
MAX_PADDED = 1 << 14


@dataclass(frozen=True, slots=True)
class Group:
    """R rows of n tokens. tokens: where they are on the token axis, row after row.

    exports: (number of the row in the group, slot) of states to copy after the last token.
    inner_export: (c, slot), the state after c < n tokens is to be copied; such a row is alone in its group.
    """

    starts: tuple[int, ...]
    n: int
    tokens: slice | Tensor
    row_R: Tensor
    position_Rn: Tensor
    exports: tuple[tuple[int, int], ...] = ()
    inner_export: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """R."""
        return len(self.starts)

    @property
    def longest(self) -> int:
        """Tokens of the longest row after this step."""
        return max(self.starts) + self.n

    @property
    def ragged(self) -> bool:
        """True if rows differ in length, so that some are padded."""
        return min(self.starts) < max(self.starts)

    @property
    def plain(self) -> bool:
        """True if attention needs no mask: rows of equal length, each one token or without history before the step."""
        return not self.ragged and (self.n == 1 or self.starts[0] == 0)

    def visible(self) -> Tensor:
        """Return which entries, of one token each, a token sees: [R, n, S]."""
        return torch.arange(self.longest, device=self.position_Rn.device) <= self.position_Rn[..., None]

    def take(self, x_T: Tensor) -> Tensor:
        """Return the group's part [R, n, ...] of a tensor over tokens; a view where they lie together."""
        return x_T[self.tokens].view(self.size, self.n, *x_T.shape[1:])

    def put(self, out_T: Tensor, values_Rn: Tensor) -> None:
        """Write values [R, n, ...] to the group's tokens."""
        out_T[self.tokens] = values_Rn.flatten(0, 1)


def partition(starts: Sequence[int], lengths: Sequence[int], alone: Collection[int]) -> Iterator[list[int]]:
    """Yield the rows of each group; rows of `alone` get their own, empty rows none."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for row, n in enumerate(lengths):
        if n:
            by_length.setdefault((n, row if row in alone else -1), []).append(row)
    for (n, _), rows in by_length.items():
        if len(rows) * n * (max(starts[row] for row in rows) + n) <= MAX_PADDED:
            yield rows
            continue
        group: list[int] = []
        # longest first: neighbours differ little, so little is padded
        for row in sorted(rows, key=lambda row: -starts[row]):
            if group and (len(group) + 1) * n * (starts[group[0]] + n) > MAX_PADDED:
                yield group
                group = []
            group.append(row)
        yield group


def token_index(rows: Sequence[int], n: int, offsets: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return where the tokens of the rows are: a slice if they lie together."""
    begins = [offsets[row] for row in rows]
    if begins == list(range(begins[0], begins[0] + len(rows) * n, n)):
        return slice(begins[0], begins[0] + len(rows) * n)
    tokens = [begin + i for begin in begins for i in range(n)]
    return torch.tensor(tokens, dtype=torch.int64, device=device)
