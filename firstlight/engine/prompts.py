"""What a user gives for a prompt and its parameters, made ready for the Engine. Knows tokenizers, no models."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from firstlight.engine.sampling_params import SamplingParams
from firstlight.engine.submission import is_text
from firstlight.errors import FirstlightError
from firstlight.text.tokenizer import Tokenizer

# a text, token ids, or a mapping with either: "prompt", "prompt_token_ids"
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_FORMS = "a prompt is a text, token ids, or a mapping with prompt or prompt_token_ids"


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, tuple[int, ...]]:
    """Return the text of a prompt, None if it has none, and its ids. Raises: FirstlightError."""
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise FirstlightError("the prompt is not valid Unicode", where="prompt", why="it has a lone surrogate")
        if not prompt:
            raise FirstlightError(
                "the prompt is empty", where="prompt", why="a model continues at least one token", fix="give some text"
            )
        return prompt, tuple(needed(tokenizer, "a text prompt").encode(prompt))
    if not isinstance(prompt, Mapping):
        return None, as_ids(prompt)
    if extra := set(prompt) - {"prompt", "prompt_token_ids"}:
        raise FirstlightError(f"a prompt has no {', '.join(map(repr, extra))}", where="prompt", why=PROMPT_FORMS)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is not None:
        return text, as_ids(ids)
    if not isinstance(text, str):
        raise FirstlightError(
            PROMPT_FORMS,
            where="prompt",
            why=f"the mapping has {', '.join(map(repr, prompt)) or 'nothing'}",
            fix="{'prompt': 'At first light'}",
        )
    return read_prompt(text, tokenizer)


def as_ids(ids: object) -> tuple[int, ...]:
    """Return token ids as plain ints, numpy's included; what is no whole number is left for the check by position.

    Raises: FirstlightError for what is no list at all.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise FirstlightError(PROMPT_FORMS, where="prompt", why=f"got {type(ids).__name__}", fix="[1, 2, 3]")
    return tuple(operator.index(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in ids)


def read_params(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with bad words as token ids, at a text's start and within it. Raises: FirstlightError."""
    if not isinstance(params, SamplingParams):
        raise FirstlightError(
            f"sampling_params are SamplingParams, got {type(params).__name__}", where="sampling_params"
        )
    if not params.bad_words:
        return params
    encoder = needed(tokenizer, "bad_words")
    # as it stands, at a text's start, and within it; white space alone only as it stands
    spelt = {
        form: None for word in params.bad_words for form in (word, word.lstrip(), f" {word.lstrip()}") if form.strip()
    }
    spelt |= {word: None for word in params.bad_words if not word.strip()}
    words = tuple(tuple(encoder.encode(form, add_special_tokens=False)) for form in spelt)
    return replace(params, bad_words_ids=(*params.bad_words_ids, *filter(None, words)))


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
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        many = list(prompts)
        if many and all(hasattr(item, "__index__") for item in many):
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
