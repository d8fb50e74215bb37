"""What a request gives back, and how its tokens become text: stops, special tokens, log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from firstlight.engine.sampler import Sampled, TopLogprob
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.stops import StopChecker
from firstlight.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, its place among all (1 the likeliest), and its text, None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation. token_ids: the ending one included; text: without it, unless asked for.

    logprobs: per token, by token id; None unless asked for, like their sum. finish_reason: None while it
    runs. stop_reason: the stop string or stop id that ended it, None for an end-of-text token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its continuations so far. prompt: None if given as ids. prompt_logprobs: the first is None.

    num_cached_tokens: of the prompt, taken from the prefix cache. metrics: seconds since arrival and counts, by name.
    error: why a continuation ended with "error", empty otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    metrics: Mapping[str, float] | None = None
    error: str = ""

    @property
    def num_output_tokens(self) -> int:
        """New tokens of all continuations."""
        return sum(len(one.token_ids) for one in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second after the first one; 0 if there is only one."""
        times = self.metrics or {}
        decoding = times.get("last_token_s", 0.0) - times.get("first_token_s", 0.0)
        return (self.num_output_tokens - 1) / decoding if decoding > 0 else 0.0


class Delta(NamedTuple):
    """What one token added: text that is final, and how the continuation ended if it did."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """True if no token follows."""
        return self.finish_reason is not None


def logprobs_by_id(entries: Sequence[TopLogprob], tokenizer: Tokenizer | None) -> Logprobs:
    """Return the entries of one token as users read them."""
    return {token: Logprob(logprob, rank, _decoded(token, tokenizer)) for token, logprob, rank in entries}


def _decoded(token: int, tokenizer: Tokenizer | None) -> str | None:
    return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None


class OutputProcessor:
    """Turns the tokens of one continuation into its output, token by token.

    It ends at a stop string, a stop id, an end-of-text token, or max_tokens, whichever comes first; an
    ending by `finish` may come from outside. The texts of all deltas join to `text`. tokenizer: None gives no text.
    eos_ids: those of the tokenizer if None.

    Raises: FirstlightError for stop strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, *, eos_ids: Collection[int] | None = None
    ) -> None:
        if params.stops and tokenizer is None:
            raise FirstlightError("stop needs text, and the model has no tokenizer", where="stop", fix="stop_token_ids")
        self._tokenizer, self._params = tokenizer, params
        eos = eos_ids if eos_ids is not None else tokenizer.eos_ids if tokenizer else ()
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self._endings = params.ending_ids(eos)
        shown = tokenizer if params.detokenize else None
        skip = params.skip_special_tokens
        self._detokenizer = Detokenizer(shown, skip_special_tokens=skip) if shown else None
        self._stops = StopChecker(params.stops, include=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._cumulative = 0.0
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def push(self, token: int, sampled: Sampled | None = None) -> Delta:
        """Return what a token adds; one that comes after the end adds nothing. sampled: carries its logprobs.

        A sampled error ends the continuation, and its token is none.
        """
        if self.finish_reason is not None:
            return Delta("", self.finish_reason, self.stop_reason)
        if sampled is not None and sampled.error is not None:
            return self.finish("error")
        self.token_ids.append(token)
        if sampled is not None and sampled.top is not None:
            self._logprobs.append(logprobs_by_id(sampled.top, self._tokenizer))
            self._cumulative += sampled.logprob or 0.0
        ends = self._armed and token in self._endings
        hidden = ends and not self._params.include_stop_str_in_output
        text = self._released("" if hidden else self._decoded(token))
        if self._stops.matched is not None:
            return self._end(text, "stop", self._stops.matched)
        if ends:
            return self._flushed(text, "stop", None if token in self._eos else token)
        if len(self.token_ids) == self._params.max_tokens:
            return self._flushed(text, "length", None)
        return Delta(text)

    def finish(self, reason: FinishReason) -> Delta:
        """Return the rest of the text, once; an ending that came before stays what it was."""
        if self.finish_reason is not None:
            return Delta("", self.finish_reason, self.stop_reason)
        return self._flushed("", reason, None)

    def completion(self, index: int = 0) -> CompletionOutput:
        """Return the continuation so far."""
        asked = self._params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs) if asked else None,
            cumulative_logprob=self._cumulative if asked else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    @property
    def _armed(self) -> bool:
        return len(self.token_ids) > self._params.min_tokens

    def _decoded(self, token: int) -> str:
        return self._detokenizer.push(token) if self._detokenizer else ""

    def _released(self, text: str) -> str:
        released, _ = self._stops.push(text, armed=self._armed)
        self._pieces.append(released)
        return released

    def _flushed(self, text: str, reason: FinishReason, stop_reason: int | None) -> Delta:
        # bytes that waited for more of their character can complete a stop string too
        text += self._released(self._detokenizer.flush() if self._detokenizer else "")
        if self._stops.matched is not None and reason in ("stop", "length"):
            return self._end(text, "stop", self._stops.matched)
        held = self._stops.flush()
        self._pieces.append(held)
        return self._end(text + held, reason, stop_reason)

    def _end(self, text: str, reason: FinishReason, stop_reason: str | int | None) -> Delta:
        self.finish_reason, self.stop_reason = reason, stop_reason
        return Delta(text, reason, stop_reason)
