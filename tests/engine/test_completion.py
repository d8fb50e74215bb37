"""Prompts continued as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from firstlight.engine.assemble import declare
from firstlight.engine.completion import Completion, Prompt, complete, has_tokenizer
from firstlight.engine.sampler import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.text.tokenizer import Tokenizer

Tiny = Callable[[str], Path]


def continued(model: str, prompt: Prompt, **options: int | tuple[int, ...]) -> tuple[Completion, list[str]]:
    """Return a greedy completion that has run, and its pieces."""
    declared = declare(model)
    completion = complete(declared, declared.plan(), prompt, SamplingParams(temperature=0.0, **options))  # type: ignore[arg-type]
    return completion, list(completion)


def demo_folder() -> Path:
    """Return the folder of the embedded model."""
    return declare("demo").source.require_folder("the test")


def test_pieces_join_to_the_decoded_ids() -> None:
    prompt = Prompt.of_text(demo_folder(), "At first light")
    completion, pieces = continued("demo", prompt, max_tokens=12)
    tokenizer = Tokenizer.load(demo_folder())
    assert "".join(pieces) == tokenizer.decode(completion.ids)
    assert prompt.ids == tuple(tokenizer.encode("At first light"))


def test_without_a_tokenizer_ids_are_shown(tiny: Tiny) -> None:
    folder = tiny("llama")
    assert not has_tokenizer(folder)
    completion, pieces = continued(str(folder), Prompt.of_ids(folder, [5, 6]), max_tokens=4)
    assert "".join(pieces).split() == [str(token) for token in completion.ids]


def test_finish_reason_tells_stop_from_length(tiny: Tiny) -> None:
    folder = tiny("llama")
    prompt = Prompt.of_ids(folder, [5, 6])
    long, _ = continued(str(folder), prompt, max_tokens=4)
    assert (long.finish_reason, len(long.ids)) == ("length", 4)
    short, _ = continued(str(folder), prompt, max_tokens=4, stop_token_ids=(long.ids[0],))
    assert (short.finish_reason, short.ids) == ("stop", long.ids[:1])
    assert short.tokens_per_s == 0.0 < long.tokens_per_s


def test_a_prompt_that_cannot_run_is_refused_before_weights_are_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.engine.completion.build_runner", lambda *a, **k: pytest.fail("weights were read"))
    folder = tiny("llama")
    with pytest.raises(FirstlightError, match="outside the vocabulary"):
        continued(str(folder), Prompt.of_ids(folder, [256]))


def test_a_chat_prompt_gets_no_second_set_of_special_tokens() -> None:
    prompt = Prompt.of_text(demo_folder(), "hello", chat=True)
    tokenizer = Tokenizer.load(demo_folder())
    assert prompt.text is not None
    assert list(prompt.ids) == tokenizer.encode(prompt.text, add_special_tokens=False)
