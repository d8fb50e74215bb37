"""Logits to token ids, each row by its own parameters. R rows, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.errors import FirstlightError

# below this a distribution is its largest logit; dividing by it would overflow
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    temperature: 0 always takes the likeliest token. top_p: least set of likeliest tokens with that
    probability. top_k: that many likeliest tokens, 0 or -1 all. min_p: tokens at least that likely
    relative to the likeliest. seed: None draws one. max_tokens: None means as many as the context
    holds. stop_token_ids: end the text like an end-of-text token. ignore_eos: end-of-text tokens do not end it.
    Raises: FirstlightError naming the parameter and its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        rules = {
            "temperature": (_is_number(self.temperature) and 0 <= self.temperature < math.inf, "a number >= 0"),
            "top_p": (_is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            "top_k": (_is_integer(self.top_k, low=-1), "an integer >= -1"),
            "min_p": (_is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            "seed": (self.seed is None or _is_integer(self.seed, low=0), "an integer >= 0 below 2^63, or None"),
            "max_tokens": (self.max_tokens is None or _is_integer(self.max_tokens, low=1), "an integer >= 1, or None"),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, tuple) and all(_is_integer(i, low=0) for i in self.stop_token_ids),
                "a tuple of token ids",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise FirstlightError(f"{name} must be {rule}, got {getattr(self, name)!r}", where=name)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def generator(self, device: str | torch.device = "cpu") -> torch.Generator:
        """Return this request's own source of randomness."""
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits_RV: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]) -> list[int]:
    """Return one token id per row. Ties of the likeliest go to the lowest id; a row draws from its generator alone."""
    greedy_R = logits_RV.argmax(dim=-1).tolist()
    rows = zip(logits_RV, params, generators, greedy_R, strict=True)
    return [greedy if p.is_greedy else _draw(logits_V, p, generator) for logits_V, p, generator, greedy in rows]


def _draw(logits_V: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    probs_V = probabilities(logits_V, params)
    return int(torch.multinomial(probs_V, 1, generator=generator))


def probabilities(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the fp32 distribution [V] that a row is drawn from: temperature, min_p, top_k, top_p, in this order.

    Ties at a cut keep the lower ids.
    """
    logits_V = logits_V.float()
    # the largest logit becomes 0 first, so that no temperature can overflow it
    probs_V = torch.softmax((logits_V - logits_V.max()) / params.temperature, dim=-1)
    sorted_V, ids_V = probs_V.sort(descending=True, stable=True)
    keep_V = sorted_V >= params.min_p * sorted_V[0]
    if params.top_k > 0:
        keep_V[params.top_k :] = False
    kept_V = sorted_V * keep_V
    before_V = kept_V.cumsum(dim=-1) - kept_V
    # with top_p 1 rounding could cut the tail
    if params.top_p < 1:
        kept_V = kept_V * (before_V < params.top_p * kept_V.sum())
    return torch.zeros_like(probs_V).scatter_(0, ids_V, kept_V / kept_V.sum())


def _is_number(value: object) -> bool:
    # True is an int to Python, and never meant as one
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object, *, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63
