"""One request: its tokens, what has been planned of them, and how it ended. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from firstlight.engine.sampling_params import SamplingParams
from firstlight.memory.prefix import Chain
from firstlight.memory.sequence import SequenceCache


class Status(Enum):
    """Where a request is. A preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request and its place in the schedule.

    ids: prompt, then output; only ever appended to. planned: tokens given to steps so far. in_flight: sampled tokens
    that steps are still computing, one per step. epoch: raised when what is in flight is void. deadline: seconds on
    the scheduler's clock. seed: decides every draw, together with the number of the output token.
    """

    id: int
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    chain: Chain
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    deadline: float | None = None
    status: Status = Status.WAITING
    sequence: SequenceCache | None = None
    planned: int = 0
    in_flight: int = 0
    epoch: int = 0
    max_total: int = 0
    checkpoints: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, the ones in flight included."""
        return len(self.ids) + self.in_flight

    @property
    def num_output(self) -> int:
        """Output tokens that are known."""
        return len(self.ids) - self.num_prompt

    @property
    def output_ids(self) -> Sequence[int]:
        """The known output tokens."""
        return self.ids[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        """True once it has ended, however."""
        return self.status is Status.FINISHED

    def order(self) -> tuple[int, int]:
        """Return what requests are served by: priority (lower first), then arrival."""
        return self.priority, self.id
