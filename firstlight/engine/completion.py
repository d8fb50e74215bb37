"""A prompt continued as text: tokenizer, model and detokenizer of one sequence, with its timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from firstlight.engine.assemble import Declared, build_runner
from firstlight.engine.generate import check_prompt, generate
from firstlight.engine.runner import Runner
from firstlight.engine.sampler import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.plan.planner import Plan
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer
from firstlight.weights.report import LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is continued. text None: given as ids. tokenizer None: the folder has none, and ids stay ids."""

    ids: tuple[int, ...]
    text: str | None
    tokenizer: Tokenizer | None

    @classmethod
    def of_text(cls, folder: Path, text: str, *, chat: bool = False) -> Prompt:
        """Return the prompt of a text or, with chat, of one user message. Raises: FirstlightError."""
        tokenizer = Tokenizer.load(folder)
        if not text:
            raise FirstlightError(
                "the prompt is empty",
                where="--prompt",
                why="a model continues at least one token",
                fix="give some text",
            )
        shown = ChatTemplate.load(folder).render([{"role": "user", "content": text}]) if chat else text
        ids = tokenizer.encode(shown, add_special_tokens=not chat)
        return cls(ids=tuple(ids), text=shown, tokenizer=tokenizer)

    @classmethod
    def of_ids(cls, folder: Path, ids: Sequence[int]) -> Prompt:
        """Return the prompt of token ids; a tokenizer is used if there is one. Raises: FirstlightError."""
        tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else None
        return cls(ids=tuple(ids), text=None, tokenizer=tokenizer)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("*.tiktoken")) or (folder / "vocab.json").is_file()


class Completion:
    """The continuation of a prompt; iterate once for its text, piece by piece as it becomes final.

    ids: the new tokens so far, the ending one included. load: what the loader did.
    """

    def __init__(
        self, runner: Runner, load: LoadReport, prompt: Prompt, params: SamplingParams, *, max_model_len: int
    ) -> None:
        self.runner, self.load, self.prompt, self.params = runner, load, prompt, params
        self.max_model_len = max_model_len
        self.ids: list[int] = []
        self.first_token_s = self.total_s = 0.0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end the text."""
        return self.prompt.tokenizer.eos_ids if self.prompt.tokenizer else ()

    def __iter__(self) -> Iterator[str]:
        """Return the pieces of the text, or each id and a space where there is no tokenizer."""
        tokenizer = self.prompt.tokenizer
        detokenizer = Detokenizer(tokenizer) if tokenizer else None
        vocab_size = self.runner.model.arch.vocab_size
        known = min(tokenizer.vocab_size, vocab_size) if tokenizer else vocab_size
        began = time.perf_counter()
        tokens = generate(
            self.runner,
            self.prompt.ids,
            self.params,
            eos_ids=self.eos_ids,
            max_model_len=self.max_model_len,
            vocab_size=known,
        )
        for token in tokens:
            self.ids.append(token)
            self.total_s = time.perf_counter() - began
            self.first_token_s = self.first_token_s or self.total_s
            yield detokenizer.push(token) if detokenizer else f"{token} "
        if detokenizer:
            yield detokenizer.flush()

    @property
    def finish_reason(self) -> str:
        """ "stop" after an ending token, "length" otherwise."""
        stops = {*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos_ids)}
        return "stop" if self.ids and self.ids[-1] in stops else "length"

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second after the first one; 0 if there is only one."""
        decoding = self.total_s - self.first_token_s
        return (len(self.ids) - 1) / decoding if decoding > 0 else 0.0


def complete(
    declared: Declared,
    plan: Plan,
    prompt: Prompt,
    params: SamplingParams,
    *,
    progress: Callable[[int], None] | None = None,
) -> Completion:
    """Return the completion of a prompt, weights loaded, nothing run yet. progress: bytes as they are loaded.

    Raises: FirstlightError for a prompt that cannot be run, before any weight is read.
    """
    max_model_len = declared.arch.max_position_embeddings
    check_prompt(prompt.ids, declared.arch.vocab_size, max_model_len)
    wanted = max_model_len if params.max_tokens is None else len(prompt.ids) + params.max_tokens
    runner, load = build_runner(declared, plan, max_tokens=min(max_model_len, wanted), progress=progress)
    return Completion(runner, load, prompt, params, max_model_len=max_model_len)
