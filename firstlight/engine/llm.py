"""LLM: the offline interface, with the semantics people know from vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from firstlight.engine.args import EngineArgs
from firstlight.engine.assemble import Declared, declare
from firstlight.engine.build import build_engine
from firstlight.engine.outputs import CompletionOutput, RequestOutput
from firstlight.engine.prompts import Prompt, as_params, as_prompts, needed, read_params, read_prompt
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.plan.planner import Plan
from firstlight.quant.policy import PrecisionPolicy
from firstlight.text.template import ChatTemplate

DEFAULTS = EngineArgs()

Message = Mapping[str, Any]


class LLM:
    """A model that generates: `LLM("demo").generate("At first light", SamplingParams(max_tokens=8))`.

    model: `demo`, a folder, or a hub id. dtype: "auto" follows the config. port: a port file outside the package.
    plan: a Plan to run exactly, instead of the planner's choice. engine_args: what the arguments here do not name.
    Not thread-safe. Raises: FirstlightError.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        gpu_memory_utilization: float | None = None,
        seed: int | None = None,
        port: str | Path | None = None,
        allow_unknown_keys: bool = False,
        plan: Plan | None = None,
        engine_args: EngineArgs = DEFAULTS,
    ) -> None:
        declared = declare(model, port_file=Path(port) if port else None, allow_unknown_keys=allow_unknown_keys)
        if plan is None:
            backbone = declared.arch.dtype if dtype == "auto" else dtype
            plan = declared.plan(PrecisionPolicy(backbone=backbone, kv_cache=kv_cache_dtype))
        given: dict[str, Any] = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed,
        }
        args = replace(engine_args, **{name: value for name, value in given.items() if value is not None})
        self._build(declared, plan, args, None)

    @classmethod
    def of(
        cls, declared: Declared, plan: Plan, args: EngineArgs, *, progress: Callable[[int], None] | None = None
    ) -> LLM:
        """Return the LLM of a model taken apart already. progress: bytes of weights as they are loaded."""
        llm = cls.__new__(cls)
        llm._build(declared, plan, args, progress)
        return llm

    def _build(self, declared: Declared, plan: Plan, args: EngineArgs, progress: Callable[[int], None] | None) -> None:
        self.folder = declared.source.require_folder("running a model")
        self.plan = plan
        self.engine, self.load_report, self.sizes = build_engine(declared, plan, args, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order. A list of ints is one prompt, a list of lists several.

        A request that failed ends with finish_reason "error", and its output says why; the others do not notice.
        use_tqdm: a progress bar, on a terminal. Raises: FirstlightError before anything runs if a prompt or its
        parameters cannot be run.
        """
        many = as_prompts(prompts)
        ids = self._submit(many, as_params(sampling_params, len(many)))
        return self._drain(ids, bar=use_tqdm and sys.stderr.isatty())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one output per conversation: the template rendered, then continued. Raises: FirstlightError."""
        template = ChatTemplate.load(self.folder)
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise FirstlightError(
                "a chat is a list of messages",
                where="messages",
                why=f"got {messages!r}"[:200],
                fix="[{'role': 'user', 'content': 'At first light'}]",
            )
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        tokenizer = needed(self.engine.tokenizer, "a chat")
        rendered = [template.render(one, tools=tools) for one in conversations]
        prompts: list[Prompt] = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in rendered
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the output of one prompt as it grows, the last one finished. Closing the iterator ends the request."""
        params = SamplingParams() if sampling_params is None else sampling_params
        text, ids = read_prompt(prompt, self.engine.tokenizer)
        params = read_params(params, self.engine.tokenizer)
        self.engine.check(ids, params)
        return self._stream(text, ids, params)

    def _stream(self, text: str | None, ids: Sequence[int], params: SamplingParams) -> Iterator[RequestOutput]:
        # queued at the first look: an iterator that nobody starts would never end its request
        request_id = self.engine.add(ids, params, prompt=text)
        try:
            shown = 0
            while True:
                # by what there is, not by the news of this step: somebody else may have run the steps in between
                found = self.engine.output(request_id)
                size = sum(len(output.token_ids) for output in found.outputs)
                if found.finished or size > shown:
                    shown = size
                    yield found
                if found.finished:
                    return
                self.engine.step()
        finally:
            self.engine.pop(request_id)

    def shown(self, completion: CompletionOutput) -> str:
        """Return the text of a continuation, or each id and a space where the model has no tokenizer."""
        if self.engine.tokenizer is not None:
            return completion.text
        return "".join(f"{token} " for token in completion.token_ids)

    def close(self) -> None:
        """End what runs and let go of the worker."""
        self.engine.close()

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        tokenizer = self.engine.tokenizer
        ready = [
            (*read_prompt(prompt, tokenizer), read_params(one, tokenizer))
            for prompt, one in zip(prompts, params, strict=True)
        ]
        submitted: list[str] = []
        try:
            for text, ids, one in ready:
                submitted.append(self.engine.add(ids, one, prompt=text))
        except ValueError:
            for request_id in submitted:
                self.engine.pop(request_id)
            raise
        return submitted

    def _drain(self, request_ids: Sequence[str], *, bar: bool) -> list[RequestOutput]:
        open_ids = set(request_ids)
        try:
            with progress_bar(len(request_ids), shown=bar) as advance:
                while open_ids:
                    news = {update.request_id for update in self.engine.step()} & open_ids
                    done = {request_id for request_id in news if self.engine.groups[request_id].is_finished}
                    advance(len(done))
                    open_ids -= done
        finally:
            found = [self.engine.pop(request_id) for request_id in request_ids]
        return found


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that moves a bar on by a count; it does nothing where no bar is shown."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda count: progress.advance(task, count)
