"""What a mixer keeps between steps, as plain data (contract 2 of the design).

Allocation, prefix cache, preemption, speculation and context parallelism read only these
declarations. Sizes are for one layer; storage order is [page, entry, *shape] and [slot, *shape].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from firstlight.spec.choices import check_choices

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "float8_e4m3fn": 1, "uint8": 1}

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDtypes:
    """Storage formats of the cache kinds; the three are independent switches."""

    kv: str = "bfloat16"
    index: str = "bfloat16"
    state: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """Paged rows: one entry of `shape` for every `tokens_per_entry` tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tokens_per_entry: int = 1
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.page_tokens % self.tokens_per_entry:
            raise ValueError(
                f"{self.name}: page_tokens={self.page_tokens} is not a multiple of "
                f"tokens_per_entry={self.tokens_per_entry}"
            )

    @property
    def entries_per_page(self) -> int:
        """Entries in one page."""
        return self.page_tokens // self.tokens_per_entry

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token, a fraction where an entry covers several tokens."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype] / self.tokens_per_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSequence:
    """One slot of `shape` for every sequence.

    recurrent: the state after the last committed token. window: the last inputs, oldest first.
    ring: entry of position p at index p % shape[0]. checkpoint: copied when a prefix is published.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["recurrent", "window", "ring"]
    checkpoint: Literal["copy", "none"] = "copy"

    def __post_init__(self) -> None:
        check_choices(self)

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerDraftToken:
    """What a verify step writes per draft token so that the accepted prefix can be folded in."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of one record."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDecl:
    """Everything one mixer remembers. `grid`: a checkpoint may be taken at multiples of it."""

    pages: tuple[PerToken, ...] = ()
    states: tuple[PerSequence, ...] = ()
    records: tuple[PerDraftToken, ...] = ()
    grid: int = 1

    @property
    def bytes_per_token(self) -> float:
        """Bytes that grow with the context."""
        return sum(page.bytes_per_token for page in self.pages)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that do not."""
        return sum(state.bytes for state in self.states)
