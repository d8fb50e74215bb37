"""Write per-token entries into pages. Reference.

    cache[page(row, pos // E), pos % E] = cast(value[t])        pos = positions_T[t], page from the row's table

Shapes: T tokens; values [T, *entry]; cache.data [P, E, *entry].
Source: definition of Paged (cache.py).
"""

from __future__ import annotations

from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows


def cache_write(values: Tensor, cache: Paged, rows: Rows) -> None:
    """Write values[t] at entry positions_T[t] of its row, cast to the cache dtype.

    Raises: ValueError if an entry covers several tokens.
    """
    if cache.tokens_per_entry != 1:
        raise ValueError(f"cache_write needs one token per entry, got {cache.tokens_per_entry}")
    for row, start, _, tokens in rows.spans():
        for position, value in enumerate(values[tokens], start):
            page = int(cache.table_RN[row, position // cache.entries_per_page])
            cache.data[page, position % cache.entries_per_page] = value.to(cache.data.dtype)
