"""What a user gives for a prompt and its parameters, made ready for the Engine. Knows tokenizers, no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.text.tokenizer import Tokenizer

# a text, token ids, or a mapping with either: "prompt", "prompt_token_ids"
Prompt = str | Sequence[int] | Mapping[str, Any]


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, tuple[int, ...]]:
    """Return the text of a prompt, None if it has none, and its ids. Raises: FirstlightError."""
    if isinstance(prompt, str):
        if not prompt:
            raise FirstlightError(
                "the prompt is empty", where="prompt", why="a model continues at least one token", fix="give some text"
            )
        return prompt, tuple(needed(tokenizer, "a text prompt").encode(prompt))
    if not isinstance(prompt, Mapping):
        return None, tuple(prompt)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is not None:
        return text, tuple(ids)
    if not isinstance(text, str):
        raise FirstlightError(
            "a prompt is a text, token ids, or a mapping with prompt or prompt_token_ids",
            where="prompt",
            why=f"the mapping has {', '.join(map(repr, prompt)) or 'nothing'}",
            fix="{'prompt': 'At first light'}",
        )
    return read_prompt(text, tokenizer)


def read_params(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with bad words as token ids, at a text's start and within it. Raises: FirstlightError."""
    if not params.bad_words:
        return params
    encoder = needed(tokenizer, "bad_words")
    spelt = [form for word in params.bad_words for form in (word.lstrip(), f" {word.lstrip()}")]
    words = tuple(tuple(encoder.encode(form, add_special_tokens=False)) for form in spelt)
    return replace(params, bad_words_ids=(*params.bad_words_ids, *words))


def needed(tokenizer: Tokenizer | None, purpose: str) -> Tokenizer:
    """Return the tokenizer. Raises: FirstlightError where the model has none."""
    if tokenizer is None:
        raise FirstlightError(
            f"{purpose} needs a tokenizer",
            where="the model's folder",
            why="it has no tokenizer files",
            fix="give token ids: {'prompt_token_ids': [1, 2, 3]}",
        )
    return tokenizer


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of whole numbers is one. Raises: FirstlightError for what is none."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence):
        many = list(prompts)
        if many and all(isinstance(item, int) for item in many):
            return [many]  # type: ignore[list-item]
        if all(isinstance(item, (str, Mapping, Sequence)) for item in many):
            return many  # type: ignore[return-value]
    raise FirstlightError(
        "a prompt is a text, token ids, or {'prompt_token_ids': ids}",
        where="prompts",
        why=f"got {type(prompts).__name__}",
        fix="give one, or a list of them",
    )


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return parameters per prompt. Raises: FirstlightError if there are as many as neither one nor the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise FirstlightError(f"{len(params)} sampling_params for {count} prompts", where="sampling_params")
    return list(params)
