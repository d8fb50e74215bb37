"""Pooled index keys, plain torch: the tokens of a group of rows and what their rings hold, in one gather.

Letters as in ref.py; R rows of n tokens, x = P + n tokens known of each, X pools completed in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.groups import Group
from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.rows import Rows


def index_pool(k_TD: Tensor, gate_TD: Tensor, ape_PD: Tensor, tail: State, keys: Paged, rows: Rows) -> None:
    """Write the key of every pool that a row completes, and leave its last P raw keys and gates in the ring.

    The ring is indexed by position % P: [:, 0] keys, [:, 1] gates.
    """
    size = ape_PD.shape[0]
    raw_T2D = torch.stack([k_TD, gate_TD], dim=1).to(tail.data.dtype)
    for group in rows.groups:
        ring_RP2D = tail.data.index_select(0, tail.slots_R.index_select(0, group.row_R))
        # the last P tokens before the step, by position % P, then its tokens
        known_Rx2D = torch.cat([ring_RP2D, group.take(raw_T2D)], dim=1)
        _write_pools(known_Rx2D, ape_PD, keys, group)
        tail.write_group(group, _ring(known_Rx2D, size, group, group.n))
        if group.inner_export:
            cut, slot = group.inner_export
            tail.data[slot] = _ring(known_Rx2D, size, group, cut)[0]


def _ring(known_Rx2D: Tensor, size: int, group: Group, n: int) -> Tensor:
    """Return the ring [R, P, 2, D] after the first n tokens."""
    cell_P = torch.arange(size, device=known_Rx2D.device)
    last_R1 = group.position_Rn[:, n - 1 : n]
    # tokens between the youngest token of a cell and the last one; older than the step: the cell stays
    age_RP = (last_R1 - cell_P) % size
    return _rows_at(known_Rx2D, torch.where(age_RP < n, size + n - 1 - age_RP, cell_P))


def _write_pools(known_Rx2D: Tensor, ape_PD: Tensor, keys: Paged, group: Group) -> None:
    size = ape_PD.shape[0]
    pools = [
        (index, entry, entry * size - start)
        for index, start in enumerate(group.starts)
        for entry in range(start // size, (start + group.n) // size)
    ]
    if not pools:
        return
    index_X, entry_X, first_X = torch.tensor(pools, device=ape_PD.device).unbind(1)
    # a token before the step is in the ring, at its position % P
    member_P = torch.arange(size, device=ape_PD.device)
    member_XP = first_X[:, None] + member_P
    member_XP = torch.where(member_XP < 0, member_P, size + member_XP)
    k_XPD, gate_XPD = known_Rx2D[index_X[:, None], member_XP].float().unbind(2)
    pooled_XD = (torch.softmax(gate_XPD + ape_PD.float(), dim=1) * k_XPD).sum(1)
    keys.flat()[keys.slots(group.row_R[index_X], entry_X)] = pooled_XD.to(keys.data.dtype)


def _rows_at(values_Rx: Tensor, index_RP: Tensor) -> Tensor:
    """Return values[r, index[r, p]], [R, P, ...]."""
    row_R1 = torch.arange(index_RP.shape[0], device=index_RP.device)[:, None]
    return values_Rx[row_R1, index_RP]
