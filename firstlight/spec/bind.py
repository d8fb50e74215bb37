"""Where an operator body would run: all that a body may look at to say whether it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BindContext:
    """The stage, the number format, the device, and the spec noun that calls the operator.

    noun: a Mixer, FeedForward, Norm or Residual, or the ArchSpec for what lies outside the layers.
    """

    stage: str
    dtype: str
    device: str
    noun: Any = None
