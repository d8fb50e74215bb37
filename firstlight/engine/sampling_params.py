"""SamplingParams: how the tokens of one request are chosen and when they end. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from firstlight.errors import FirstlightError

# below this a distribution is its largest logit; dividing by it would overflow
GREEDY_TEMPERATURE = 1e-5
MAX_INTEGER = 2**63
MAX_N = 16384
MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; names and meanings are vLLM's.

    n: independent continuations. temperature: 0 always takes the likeliest token. top_p: least set of
    likeliest tokens with that probability. top_k: that many likeliest tokens, 0 or -1 all. min_p: tokens
    at least that likely relative to the likeliest. repetition_penalty: divides the positive logits of
    tokens in prompt or output, multiplies the negative ones. presence_penalty, frequency_penalty:
    subtracted once, and once per occurrence, from tokens of the output. logit_bias: added by token id.
    allowed_token_ids: the only ones. bad_words: texts that must not be completed; bad_words_ids: the same
    as token ids, filled in by whoever has the tokenizer.
    stop, stop_token_ids: end the output; it shows them only with include_stop_str_in_output. min_tokens:
    neither these nor an end-of-text token come among so many first tokens. max_tokens: None means as many
    as the context holds. ignore_eos: end-of-text tokens do not end it. seed: None draws one.
    logprobs, prompt_logprobs: likeliest tokens reported per token beside the token itself; 0 that token
    only, -1 all, None nothing. skip_special_tokens: not shown in the text. detokenize: False makes no text.

    Raises: FirstlightError naming the parameter and its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, (holds, rule) in _rules(self).items():
            if not holds:
                raise FirstlightError(f"{name} must be {rule}, got {_shown(getattr(self, name))}", where=name)
        self._freeze()
        for name, what in _contradictions(self):
            raise FirstlightError(what, where=name)

    def _freeze(self) -> None:
        # lists are the caller's own and may change; None is vLLM's word for an empty one
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        frozen: dict[str, object] = {"stop": stop, "stop_token_ids": tuple(self.stop_token_ids or ())}
        frozen["bad_words"] = tuple(self.bad_words or ())
        frozen["bad_words_ids"] = tuple(tuple(word) for word in self.bad_words_ids or ())
        if self.allowed_token_ids is not None:
            frozen["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.logit_bias is not None:
            frozen["logit_bias"] = dict(self.logit_bias)
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """True if anything but temperature and the cuts changes what can be chosen."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        chosen = self.allowed_token_ids is not None or bool(self.logit_bias) or bool(self.bad_words_ids)
        return penalised or chosen or self.min_tokens > 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, in the order given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def ending_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """Return the ids that end the output."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def validate_ids(self, vocab_size: int) -> None:
        """Check every token id against the vocabulary. Raises: FirstlightError naming the parameter and the limit."""
        for name, ids in self._named_ids():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise FirstlightError(
                        f"token id {token} of {name} is outside the vocabulary",
                        where=name,
                        why=f"ids of this model are 0 to {vocab_size - 1}",
                        fix="use this model's own tokenizer",
                    )

    def _named_ids(self) -> Iterator[tuple[str, Collection[int]]]:
        yield "logit_bias", self.logit_bias or ()
        yield "allowed_token_ids", self.allowed_token_ids or ()
        yield "stop_token_ids", self.stop_token_ids
        for word in self.bad_words_ids:
            yield "bad_words", word


def _rules(p: SamplingParams) -> dict[str, tuple[bool, str]]:
    """Return name -> whether its rule holds, and the rule in words."""
    penalty = "a number in [-2, 2]"
    count, flag = "an integer >= -1, or None", "True or False"
    return {
        "n": (_is_integer(p.n, low=1) and p.n <= MAX_N, f"an integer in [1, {MAX_N}]"),
        "temperature": (_is_number(p.temperature) and p.temperature >= 0, "a number >= 0"),
        "top_p": (_is_number(p.top_p) and 0 < p.top_p <= 1, "a number in (0, 1]"),
        "top_k": (_is_integer(p.top_k, low=-1), "an integer >= -1"),
        "min_p": (_is_number(p.min_p) and 0 <= p.min_p <= 1, "a number in [0, 1]"),
        "repetition_penalty": (
            _is_number(p.repetition_penalty) and 0.01 <= p.repetition_penalty <= 100,
            "a number in [0.01, 100]",
        ),
        "presence_penalty": (_is_number(p.presence_penalty) and -2 <= p.presence_penalty <= 2, penalty),
        "frequency_penalty": (_is_number(p.frequency_penalty) and -2 <= p.frequency_penalty <= 2, penalty),
        "logit_bias": (p.logit_bias is None or _is_bias(p.logit_bias), "token id -> number in [-100, 100], or None"),
        "allowed_token_ids": (
            p.allowed_token_ids is None or (_are_ids(p.allowed_token_ids) and len(p.allowed_token_ids) > 0),
            "one or more token ids, or None",
        ),
        "bad_words": (p.bad_words is None or _are_texts(p.bad_words), "texts, none of them empty"),
        "bad_words_ids": (p.bad_words_ids is None or _are_words(p.bad_words_ids), "lists of token ids, none empty"),
        "stop": (_is_stop(p.stop), "a text or texts, none of them empty"),
        "stop_token_ids": (p.stop_token_ids is None or _are_ids(p.stop_token_ids), "token ids"),
        "include_stop_str_in_output": (isinstance(p.include_stop_str_in_output, bool), flag),
        "min_tokens": (_is_integer(p.min_tokens, low=0), "an integer >= 0"),
        "max_tokens": (p.max_tokens is None or _is_integer(p.max_tokens, low=1), "an integer >= 1, or None"),
        "ignore_eos": (isinstance(p.ignore_eos, bool), flag),
        "seed": (p.seed is None or _is_integer(p.seed, low=0), "an integer >= 0 below 2^63, or None"),
        "logprobs": (p.logprobs is None or _is_integer(p.logprobs, low=-1), count),
        "prompt_logprobs": (p.prompt_logprobs is None or _is_integer(p.prompt_logprobs, low=-1), count),
        "skip_special_tokens": (isinstance(p.skip_special_tokens, bool), flag),
        "detokenize": (isinstance(p.detokenize, bool), flag),
    }


def _contradictions(p: SamplingParams) -> Iterator[tuple[str, str]]:
    """Yield the parameters that are fine alone and impossible together."""
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        yield "min_tokens", f"min_tokens must be at most max_tokens, got {p.min_tokens} > {p.max_tokens}"
    if p.n > 1 and p.is_greedy:
        yield "n", f"n must be 1 with temperature 0, which gives {p.n} times the same"
    if p.stops and not p.detokenize:
        yield "stop", "stop needs text to look at: detokenize must be True, or stop_token_ids be used"
    banned = {word[0] for word in p.bad_words_ids if len(word) == 1}
    if p.allowed_token_ids is not None and banned.issuperset(p.allowed_token_ids):
        yield "allowed_token_ids", "allowed_token_ids must hold a token that bad_words do not forbid"
    if p.allowed_token_ids is not None and p.min_tokens and set(p.stop_token_ids).issuperset(p.allowed_token_ids):
        yield "allowed_token_ids", f"allowed_token_ids must hold a token that is no stop, for min_tokens {p.min_tokens}"


def _is_number(value: object) -> bool:
    # True is an int to Python, and never meant as one; an int may be too large for a float
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < MAX_INTEGER


def _is_integer(value: object, *, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < MAX_INTEGER


def _are_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_integer(token, low=0) for token in value)


def _are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_are_ids(word) and len(word) > 0 for word in value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) and text != "" for text in value)


def _is_stop(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "") or _are_texts(value)


def _is_bias(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(_is_integer(token, low=0) and _is_number(bias) and -100 <= bias <= 100 for token, bias in value.items())


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write out an integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
