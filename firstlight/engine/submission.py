"""What a request must be to be queued: every check that can fail happens here, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.engine.randomness import sample_seed
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError


def check_request(ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> int:
    """Return the most tokens that prompt and output may have together. Raises: FirstlightError naming the limit."""
    check_prompt(ids, vocab_size, max_model_len)
    params.validate_ids(vocab_size)
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


def resolved_seed(params: SamplingParams, engine_seed: int, number: int, index: int) -> int:
    """Return the seed of one continuation. number: of the request's first continuation, counted over the engine's life.

    Without a seed of its own a request gets one from the engine's seed and from what came before it.
    """
    return sample_seed(engine_seed, number + index) if params.seed is None else sample_seed(params.seed, index)
