"""Caches for tests: shuffled pages and slots, page 0 and slot 0 unused, everything unwritten NaN.

R rows, N pages of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.rows import Rows

SCENARIOS: dict[str, list[tuple[int, int]]] = {
    "empty": [(0, 0)],
    "one": [(0, 1)],
    "63": [(0, 63)],
    "130": [(0, 130)],
    "ragged": [(0, 5), (9, 0), (3, 1), (61, 66), (0, 0), (130, 2), (2, 63), (0, 1)],
    "equal": [(0, 20), (70, 20), (4, 3), (5, 20), (0, 1), (64, 3), (0, 3), (200, 1)],
    "decode": [(40, 1), (0, 1), (63, 1), (7, 0), (129, 1), (1, 1)],
}


def paged(
    gen: torch.Generator,
    pairs: list[tuple[int, int]],
    entry: tuple[int, ...],
    dtype: torch.dtype,
    *,
    page: int = 8,
    tokens_per_entry: int = 1,
    written: list[int] | None = None,
    integers: bool = False,
    device: str = "cpu",
) -> Paged:
    """Return a cache with the first written[r] entries of each row filled; default: all of start + n tokens."""
    counts = [(start + n) // tokens_per_entry for start, n in pairs]
    pages = [-(-count // page) for count in counts]
    num_pages = sum(pages) + 3
    order = (torch.randperm(num_pages - 1, generator=gen) + 1).tolist()
    table = torch.zeros(len(pairs), max([1, *pages]), dtype=torch.int32)
    data = torch.full((num_pages, page, *entry), float("nan"))
    for row, count in enumerate(counts if written is None else written):
        taken, order = order[: pages[row]], order[pages[row] :]
        table[row, : pages[row]] = torch.tensor(taken, dtype=torch.int32)
        for index in range(count):
            values = small_integers(gen, *entry) if integers else torch.randn(*entry, generator=gen)
            data[taken[index // page], index % page] = values
    return Paged(data.to(device, dtype), table.to(device), tokens_per_entry)


def state(
    gen: torch.Generator,
    pairs: list[tuple[int, int]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
) -> State:
    """Return state slots, filled where a row has history."""
    num_slots = len(pairs) + 3
    slots = torch.randperm(num_slots - 1, generator=gen)[: len(pairs)] + 1
    data = torch.full((num_slots, *shape), float("nan"))
    for row, (start, _) in enumerate(pairs):
        if start > 0:
            data[slots[row]] = torch.randn(*shape, generator=gen)
    return State(data.to(device, dtype), slots.to(device))


def small_integers(gen: torch.Generator, *shape: int, bound: int = 2) -> Tensor:
    """Return whole numbers in [-bound, bound] as fp32: sums of their products are exact, and ties are frequent."""
    return torch.randint(-bound, bound + 1, shape, generator=gen).float()


def rows_of(name: str, device: str = "cpu") -> Rows:
    """Return the rows of a scenario."""
    return Rows.of(SCENARIOS[name], device)
