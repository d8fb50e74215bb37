"""Write per-token entries into pages: one scatter for all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows


def cache_write(values: Tensor, cache: Paged, rows: Rows) -> None:
    """Write values[t] at entry positions_T[t] of its row, cast to the cache dtype.

    Raises: ValueError if an entry covers several tokens.
    """
    if cache.tokens_per_entry != 1:
        raise ValueError(f"cache_write needs one token per entry, got {cache.tokens_per_entry}")
    page_T = cache.table_RN[rows.row_T, torch.floor_divide(rows.positions_T, cache.entries_per_page)]
    cache.data[page_T, rows.positions_T % cache.entries_per_page] = values.to(cache.data.dtype)
