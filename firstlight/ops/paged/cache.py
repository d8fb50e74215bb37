"""Views of the arenas that a layer's operators read and write in place.

P pages, E entries per page, R rows, S slots. Page 0 and slot 0 are scratch: padding writes there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """Per-token entries of one layer. data: [P, E, *entry]; table_RN: int32 page numbers per row."""

    data: Tensor
    table_RN: Tensor
    tokens_per_entry: int = 1

    @property
    def entries_per_page(self) -> int:
        """E."""
        return self.data.shape[1]

    def slots(self, row_T: Tensor, entry_T: Tensor) -> Tensor:
        """Return the physical slot, page * E + offset, of entry number entry_T of sequence row_T; int64 [T]."""
        page = self.table_RN[row_T, entry_T // self.entries_per_page].long()
        return page * self.entries_per_page + entry_T % self.entries_per_page

    def flat(self) -> Tensor:
        """Return the entries by physical slot: a view [P * E, *entry]."""
        return self.data.view(-1, *self.data.shape[2:])

    def read(self, row: int, num_entries: int) -> Tensor:
        """Return the first num_entries entries of a row, gathered: [num_entries, *entry]."""
        entries = torch.arange(num_entries, device=self.data.device)
        return self.flat()[self.slots(torch.full_like(entries, row), entries)]


@dataclass(frozen=True, slots=True)
class State:
    """Per-sequence tensors of one layer. data: [S, *shape]; slots_R: int64 slot of each row."""

    data: Tensor
    slots_R: Tensor
