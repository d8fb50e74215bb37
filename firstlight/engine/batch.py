"""What one step does and what came of it: plain data between scheduler and runner. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstlight.engine.request import Request
from firstlight.memory.sequence import Hold

if TYPE_CHECKING:
    from firstlight.engine.sampler import Sampled, TopLogprob


@dataclass(slots=True, eq=False)
class PlanRow:
    """Tokens [start, start + n) of a request.

    known: how many ids of the request exist at planning; a token beyond them is what the step before sampled.
    samples: the row reaches the request's last token, so one more is sampled. export: (position, slot) to keep
    the state at. epoch: the request's, when planned; another one later voids the row.
    """

    request: Request
    hold: Hold
    start: int
    n: int
    known: int
    samples: bool
    epoch: int
    export: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class BatchPlan:
    """The rows of one step, and the state copies (source slot, target slot) that come first."""

    rows: list[PlanRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.n for row in self.rows)


@dataclass(slots=True, eq=False)
class StepResult:
    """One entry per row: what was sampled (None where nothing was), and the prompt's logprobs where asked."""

    sampled: list[Sampled | None]
    prompt_logprobs: list[list[tuple[TopLogprob, ...]]]
