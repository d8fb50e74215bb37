"""What was loaded and what was not, in a form to print and to store."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass

from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.loadplan import LoadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """Skipped tensors that share a reason and a name but for its numbers, which read `*`."""

    pattern: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The outcome of a load. tensors: of the checkpoint that were used; bytes: of the parameters filled."""

    tensors: int
    bytes: int
    skipped: tuple[SkippedGroup, ...]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for JSON."""
        return asdict(self)


def summarise(plan: LoadPlan, checkpoint: Checkpoint, *, num_bytes: int, notices: tuple[str, ...] = ()) -> LoadReport:
    """Return the report of a load that filled num_bytes; notices follow those of the checkpoint."""
    counts = Counter((re.sub(r"\d+", "*", name), reason) for name, reason in plan.skipped.items())
    skipped = tuple(SkippedGroup(pattern=key[0], count=count, reason=key[1]) for key, count in counts.items())
    tensors = len(plan.sources(""))
    return LoadReport(tensors=tensors, bytes=num_bytes, skipped=skipped, notices=checkpoint.notices + notices)
