"""Nouns beside the vocabulary: an absent sub-layer, and what a port file brings itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from firstlight.spec.caches import CacheDecl, CacheDtypes
from firstlight.spec.weight import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A sub-layer that a layer does not have: no weights, no memory, no norm, no step of the residual."""

    def operators(self) -> tuple[str, ...]:
        """No operators."""
        return ()

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """No memory."""
        return CacheDecl()


NOTHING = Nothing()


class NewNoun(ABC):
    """A mixer or feed-forward that the vocabulary lacks. A port file subclasses it as a frozen dataclass.

    It names its operators, memory and weights as data, and calls the operators in `forward`. Everything else
    (loading, prefix cache, chunked prefill, costs, verification) follows from these.
    """

    __slots__ = ()

    label: ClassVar[str]

    @abstractmethod
    def operators(self) -> tuple[str, ...]:
        """Names of the operators that `forward` calls."""

    @abstractmethod
    def weights(self, hidden_size: int) -> Weights:
        """Parameters, named within the mixer or feed-forward, as in `linear("in_proj", outputs, hidden_size)`."""

    @abstractmethod
    def forward(self, x_TH: Any, weights: Mapping[str, Any], ctx: Any) -> Any:
        """Return y [T, H] for the normed input x [T, H] of all rows of a step.

        weights: parameter by name. ctx: `ops` (the operators named above, by name), `rows` (which tokens of which
        sequences these are), `cache.pages` and `cache.states` (the memory declared, by name).
        """

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """Memory kept between steps: none, as for a feed-forward."""
        return CacheDecl()

    def flops(self, context: int) -> int:
        """FLOPs of one token that sees `context` tokens, beyond 2 per element of the weights that multiply."""
        return 0
