"""Views of the arenas that a layer's operators read and write in place.

P pages, E entries per page, R rows, S slots of states or entries of a row. Page 0 and slot 0 are scratch:
padding writes there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.ops.groups import Group


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
        page = self.table_RN[row_T, torch.floor_divide(entry_T, self.entries_per_page)].long()
        return page * self.entries_per_page + entry_T % self.entries_per_page

    def flat(self) -> Tensor:
        """Return the entries by physical slot: a view [P * E, *entry]."""
        return self.data.view(-1, *self.data.shape[2:])

    def read(self, row: int, num_entries: int) -> Tensor:
        """Return the first num_entries entries of a row, gathered: [num_entries, *entry]."""
        entries = torch.arange(num_entries, device=self.data.device)
        return self.flat()[self.slots(torch.full_like(entries, row), entries)]

    def group_slots(self, group: Group) -> Tensor:
        """Return the slots of all entries up to the longest row's last, int32 [R, S]; behind a row's last any slot."""
        num_entries = group.longest // self.tokens_per_entry
        page_RN = self.table_RN[:, : -(-num_entries // self.entries_per_page)].index_select(0, group.row_R)
        offset_E = torch.arange(self.entries_per_page, dtype=torch.int32, device=page_RN.device)
        slot_RNE = page_RN[..., None] * self.entries_per_page + offset_E
        return slot_RNE.flatten(1)[:, :num_entries]

    def read_group(self, group: Group, dtype: torch.dtype) -> Tensor:
        """Return the entries of the group's rows, [R, S, *entry]; behind a row's last, copies of it.

        Copies, because memory that nobody wrote may hold NaN, and 0 * NaN is NaN. A row without entries gives anything.
        """
        slot_RS = self.group_slots(group)
        if group.ragged and slot_RS.shape[1]:
            last_R1 = (group.position_Rn[:, -1:] + 1) // self.tokens_per_entry - 1
            absent_RS = torch.arange(slot_RS.shape[1], device=slot_RS.device) > last_R1
            slot_RS = torch.where(absent_RS, slot_RS.gather(1, last_R1.clamp(min=0)), slot_RS)
        return self._select(slot_RS, dtype)

    def read_window(self, group: Group, window: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (entries [R, S, *entry], their numbers [R, S]) from the first token's window to the last token.

        The window of a token: the last `window` tokens up to itself. For entries of one token. Padded as read_group.
        """
        first_R1 = (group.position_Rn[:, :1] + 1 - window).clamp(min=0)
        number_RS = first_R1 + torch.arange(window - 1 + group.n, device=first_R1.device)
        slot_RS = self.slots(group.row_R[:, None], torch.minimum(number_RS, group.position_Rn[:, -1:]))
        return self._select(slot_RS, dtype), number_RS

    def _select(self, slot_RS: Tensor, dtype: torch.dtype) -> Tensor:
        entries = self.flat().index_select(0, slot_RS.flatten())
        return entries.view(*slot_RS.shape, *self.data.shape[2:]).to(dtype)


@dataclass(frozen=True, slots=True)
class State:
    """Per-sequence tensors of one layer. data: [S, *shape]; slots_R: int64 slot of each row."""

    data: Tensor
    slots_R: Tensor

    def read_group(self, group: Group) -> Tensor:
        """Return the states before the step in fp32, [R, *shape]; zero where a row starts at 0."""
        states = self.data.index_select(0, self.slots_R.index_select(0, group.row_R)).float()
        if 0 in group.starts:
            # a fresh slot may hold anything, NaN included, so it is replaced, not multiplied
            fresh_R = group.position_Rn[:, 0] == 0
            states = states.masked_fill_(fresh_R.view(-1, *[1] * (states.dim() - 1)), 0)
        return states

    def write_group(self, group: Group, states: Tensor) -> None:
        """Store the states [R, *shape] after the group's last tokens, and copies where they are to be exported."""
        states = states.to(self.data.dtype)
        self.data[self.slots_R.index_select(0, group.row_R)] = states
        for index, slot in group.exports:
            self.data[slot] = states[index]
