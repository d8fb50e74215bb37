"""What a request must be to be queued: every check that can fail happens here, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from firstlight.engine.randomness import sample_seed
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError


def check_request(
    ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int, eos_ids: Collection[int] = ()
) -> int:
    """Return the most tokens that prompt and output may have together. Raises: FirstlightError naming the limit."""
    check_prompt(ids, vocab_size, max_model_len)
    params.validate_ids(vocab_size)
    room = max_model_len - len(ids)
    if params.min_tokens > room:
        raise FirstlightError(
            f"min_tokens is {params.min_tokens}, there is room for {room}",
            where="min_tokens",
            why=f"the prompt has {len(ids)} of {max_model_len} tokens",
            fix=f"min_tokens={room}",
        )
    allowed = params.allowed_token_ids
    if allowed is not None and params.min_tokens and set(allowed) <= params.ending_ids(eos_ids):
        raise FirstlightError(
            "allowed_token_ids are all ending tokens, and min_tokens forbids those at first",
            where="allowed_token_ids",
            fix="min_tokens=0, or allow another token",
        )
    if params.max_tokens is None:
        return max_model_len
    total = len(ids) + params.max_tokens
    if total > max_model_len:
        raise FirstlightError(
            f"prompt and max_tokens ask for {total} tokens, the maximum is {max_model_len}",
            where="max_tokens",
            why=f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}",
            fix=f"max_tokens={max_model_len - len(ids)}",
        )
    return total


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Check that a prompt can be run and leaves room for one token. Raises: FirstlightError."""
    if not ids:
        raise FirstlightError("the prompt is empty", why="a model continues at least one token", fix="give some text")
    check_ids(ids, vocab_size, of="the prompt")
    if len(ids) >= max_model_len:
        raise FirstlightError(
            f"the prompt has {len(ids)} tokens, the maximum is {max_model_len - 1}",
            where="max_model_len",
            why=f"prompt and answer share the {max_model_len} tokens of max_model_len, and an answer has at least one",
            fix="shorten the prompt",
        )


def check_ids(ids: Sequence[int], vocab_size: int, *, of: str) -> None:
    """Check that every id is a row of the embedding. Raises: FirstlightError naming the first that is not."""
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise FirstlightError(
                f"token id {token} at position {position} of {of} is outside the vocabulary",
                why=f"ids of this model are 0 to {vocab_size - 1}",
                fix="use this model's own tokenizer",
            )


def check_service(priority: int, deadline_s: float | None, salt: str) -> None:
    """Check how a request is to be served. Raises: FirstlightError naming the parameter."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise FirstlightError(f"priority must be an integer, got {priority!r}", where="priority")
    number = isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (number and math.isfinite(deadline_s) and deadline_s >= 0):
        raise FirstlightError(f"deadline_s must be seconds >= 0, or None, got {deadline_s!r}", where="deadline_s")
    if not is_text(salt):
        raise FirstlightError(f"salt must be a text of valid Unicode, got {salt!r}", where="salt")


def is_text(value: object) -> bool:
    """True for a str that can be encoded; a lone surrogate cannot."""
    return isinstance(value, str) and not any(0xD800 <= ord(letter) <= 0xDFFF for letter in value)


def resolved_seed(params: SamplingParams, engine_seed: int, number: int, index: int) -> int:
    """Return the seed of one continuation. number: of the request's first continuation, counted over the engine's life.

    Without a seed of its own a request gets one from the engine's seed and from what came before it.
    """
    return sample_seed(engine_seed, number + index) if params.seed is None else sample_seed(params.seed, index)
