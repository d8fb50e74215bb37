"""Scores behind a choice, to tell a wrong choice from a tie. T tokens, S entries, E experts.

A set that differs from the reference's is a fault only if the entries in question do not tie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows

TIE = 1e-5


def index_scores(q_TID: Tensor, weights_TI: Tensor, keys: Paged, rows: Rows) -> Tensor:
    """Return fp32 scores [T, S] of the one row's entries, visible or not."""
    num_entries = (rows.starts[0] + rows.lengths[0]) // keys.tokens_per_entry
    k_SD = keys.read(0, num_entries).float()
    dots_TIS = torch.relu(torch.einsum("tid,sd->tis", q_TID.float(), k_SD) * q_TID.shape[-1] ** -0.5)
    return torch.einsum("tis,ti->ts", dots_TIS, weights_TI.float())


def choice_scores(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, *, score: str, **rest: Any) -> Tensor:
    """Return the fp32 scores [T, E] that a router's choice is made on, before groups."""
    logits_TE = x_TH.float() @ weight_EH.float().T
    p_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else torch.softmax(logits_TE, dim=-1)
    return p_TE if bias_E is None else p_TE + bias_E


def tied(scores_S: Tensor, ours: set[int], theirs: set[int]) -> bool:
    """True if what only one side chose scores within TIE of each other."""
    only = sorted(ours ^ theirs)
    if not only:
        return True
    values = scores_S[only]
    return bool((values.max() - values.min()) <= TIE)


def positions_of(slots_TK: Tensor, latent: Paged) -> Tensor:
    """Return the positions behind physical slots of the one sequence, [T, K], -1 where there is none."""
    size = latent.entries_per_page
    page_of = torch.full((latent.data.shape[0],), -1, dtype=torch.int64)
    page_of[latent.table_RN[0].long()] = torch.arange(latent.table_RN.shape[1])
    slots = slots_TK.long()
    return torch.where(slots >= 0, page_of[slots.clamp(min=0) // size] * size + slots % size, -1)
