"""Generation of one sequence: the prompt in chunks, then token by token. Knows nothing about text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from firstlight.engine.runner import Row, Runner
from firstlight.engine.sampler import SamplingParams, sample
from firstlight.errors import FirstlightError
from firstlight.memory.sequence import SequenceCache


def generate(
    runner: Runner,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    eos_ids: Collection[int],
    chunk_tokens: int = 512,
    max_model_len: int,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Return an iterator over the new tokens, the ending one included.

    It ends after an end-of-text or stop token, after max_tokens, or when prompt and new tokens fill
    max_model_len; the sequence's memory is given back then, and when the iterator is closed.
    vocab_size: that of the tokenizer where the model's head is padded beyond it; the padding is never chosen.
    Raises: FirstlightError, before anything runs, for a prompt that cannot be run. MemoryError when the pool is full.
    """
    vocab_rows = runner.model.arch.vocab_size
    check_prompt(prompt_ids, vocab_rows, max_model_len)
    check_ids(params.stop_token_ids, vocab_rows, of="stop_token_ids")
    if chunk_tokens < 1:
        raise FirstlightError(f"a prompt cannot be run in chunks of {chunk_tokens} tokens", fix="chunk_tokens=512")
    room = max_model_len - len(prompt_ids)
    num_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
    chunks = [prompt_ids[start : start + chunk_tokens] for start in range(0, len(prompt_ids), chunk_tokens)]
    return _tokens(runner, chunks, params, stops=stops, num_tokens=num_tokens, vocab_size=vocab_size or vocab_rows)


def _tokens(
    runner: Runner,
    chunks: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    stops: frozenset[int],
    num_tokens: int,
    vocab_size: int,
) -> Iterator[int]:
    generator = params.generator(runner.plan.device)
    sequence = SequenceCache(runner.pool)
    try:
        for ids in chunks:
            logits_RV = runner.run([Row(sequence, ids)])
        for remaining in reversed(range(num_tokens)):
            token = sample(logits_RV[:, :vocab_size], [params], [generator])[0]
            yield token
            if token in stops or not remaining:
                return
            logits_RV = runner.run([Row(sequence, [token])])
    finally:
        sequence.release()


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Check that a prompt can be run and leaves room for one token. Raises: FirstlightError."""
    if not ids:
        raise FirstlightError("the prompt is empty", why="a model continues at least one token", fix="give some text")
    check_ids(ids, vocab_size, of="the prompt")
    if len(ids) >= max_model_len:
        raise FirstlightError(
            f"the prompt has {len(ids)} tokens, the maximum is {max_model_len - 1}",
            why=f"prompt and answer share a context of {max_model_len} tokens, and an answer has at least one",
            fix="shorten the prompt, or raise --max-model-len",
        )


def check_ids(ids: Sequence[int], vocab_size: int, *, of: str) -> None:
    """Check that every id is a row of the embedding. Raises: FirstlightError naming the first that is not."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise FirstlightError(
                f"token id {token} at position {position} of {of} is outside the vocabulary",
                why=f"ids of this model are 0 to {vocab_size - 1}",
                fix="use this model's own tokenizer",
            )
