"""generate: prompts continued; one as it comes, several at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.flags import EngineFlags, ModelFlags, OutputFlags, PlanFlags, RunFlags, limited, token_ids
from firstlight.cli.output import SOFT, Output
from firstlight.errors import EXIT_CHECK_FAILED, EXIT_OK, FirstlightError

if TYPE_CHECKING:
    from pathlib import Path

    from firstlight.engine.llm import LLM
    from firstlight.engine.outputs import CompletionOutput, RequestOutput
    from firstlight.engine.prompts import Prompt
    from firstlight.engine.sampling_params import SamplingParams
    from firstlight.text.tokenizer import Tokenizer

# where --max-tokens is not given and the context has room for it
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen and when they end; the same for every prompt."""

    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="New tokens at most; 64, or as many as fit."),
    ] = None
    n: Annotated[int, typer.Option("--n", metavar="N", help="Continuations of each prompt.")] = 1
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", help="0: always the likeliest.")] = 1.0
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", help="Least set of that probability.")] = 1.0
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", help="So many likeliest; 0: all.")] = 0
    min_p: Annotated[float, typer.Option("--min-p", metavar="X", help="Tokens that likely beside the likeliest.")] = 0.0
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the text, not shown. Repeatable.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", metavar="N", help="So many likeliest tokens beside each; with --json.")
    ] = None

    def params(self, seed: int, room: int) -> SamplingParams:
        """Return the parameters. room: tokens that the context has left. Raises: FirstlightError."""
        from firstlight.engine.sampling_params import SamplingParams

        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            seed=seed,
            max_tokens=max(1, min(MAX_TOKENS, room)) if self.max_tokens is None else self.max_tokens,
        )


def generate(
    model: ModelFlags,
    plan: PlanFlags,
    run: RunFlags,
    engine: EngineFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue. Repeatable.")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option("--prompt-ids", metavar="IDS", help="The same as token ids: 1,2,3. Repeatable.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
) -> int:
    """Continue prompts: one is printed as it comes, several run at once. Tokens per second on stderr."""
    from firstlight.engine.llm import LLM
    from firstlight.plan.explain import memory

    out = Output(output)
    out.model(model.model, stderr=True)
    sampling.params(run.seed, room=1)
    if sampling.logprobs is not None and not output.json:
        out.warn("--logprobs has no effect without --json")
    declared = limited(model.declare(), run.max_model_len)
    out.notices(declared.port.notices)
    args = engine.args(run)
    made = plan.build(declared)
    out.refusals(made)
    folder = declared.source.require_folder("generation")
    limit, vocab_size = declared.arch.max_position_embeddings, declared.arch.vocab_size
    requests = read_requests(folder, prompt, prompt_ids, sampling, run.seed, chat=chat, limit=limit, vocab=vocab_size)
    with out.bar("weights", memory(made, declared.arch).weight_bytes) as advance:
        llm = LLM.of(declared, made, args, progress=advance)
    for notice in llm.sizes.notices:
        out.note(notice)
    single = len(requests) == 1 and sampling.n == 1
    began = time.perf_counter()
    found = [streamed(out, llm, *requests[0])] if single else together(out, llm, requests)
    seconds = time.perf_counter() - began
    llm.close()
    return told(out, model.model, llm, found, seconds)


Request = tuple["Prompt", "SamplingParams"]


def read_requests(
    folder: Path,
    texts: Sequence[str] | None,
    ids: Sequence[str] | None,
    sampling: SamplingFlags,
    seed: int,
    *,
    chat: bool,
    limit: int,
    vocab: int,
) -> list[Request]:
    """Return the prompts with their parameters, checked before any weight is read. Raises: FirstlightError."""
    from firstlight.engine.build import has_tokenizer
    from firstlight.engine.prompts import needed, read_prompt
    from firstlight.engine.submission import check_request
    from firstlight.text.tokenizer import Tokenizer

    check_prompt_flags(texts, ids, chat=chat)
    tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) or not ids else None
    given: list[Prompt] = [token_ids(text, flag="--prompt-ids") for text in ids or ()]
    given += [rendered(folder, needed(tokenizer, "--chat"), text) if chat and text else text for text in texts or ()]
    requests: list[Request] = []
    for one in given:
        text, numbers = read_prompt(one, tokenizer)
        params = sampling.params(seed, limit - len(numbers))
        check_request(numbers, params, vocab, limit)
        requests.append(({"prompt": text, "prompt_token_ids": numbers}, params))
    return requests


def check_prompt_flags(texts: Sequence[str] | None, ids: Sequence[str] | None, *, chat: bool) -> None:
    """Check that prompts are given in one way. Raises: FirstlightError."""
    if bool(texts) == bool(ids):
        raise FirstlightError(
            "prompts of two kinds" if texts else "no prompt",
            where="firstlight generate",
            why="exactly one of --prompt and --prompt-ids is continued",
            fix='-p "At first light"',
        )
    if chat and ids:
        raise FirstlightError(
            "--chat goes with text",
            where="--prompt-ids",
            why="a chat template renders text",
            fix="-p TEXT, or drop --chat",
        )


def rendered(folder: Path, tokenizer: Tokenizer, text: str) -> Prompt:
    """Return a text as one message of a user, in the model's chat template, which writes its own special tokens."""
    from firstlight.text.template import ChatTemplate

    shown = ChatTemplate.load(folder).render([{"role": "user", "content": text}])
    return {"prompt": shown, "prompt_token_ids": tokenizer.encode(shown, add_special_tokens=False)}


def streamed(out: Output, llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print one continuation as it comes and return the request."""
    shown = 0
    for output in llm.stream(prompt, params):
        text = llm.shown(output.outputs[0])
        out.stream(text[shown:])
        shown = len(text)
    out.line()
    return output


def together(out: Output, llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """Run requests at once, print each continuation under its prompt, and return them."""
    prompts, params = zip(*requests, strict=True)
    found = llm.generate(prompts, params, use_tqdm=not out.flags.quiet)
    for number, output in enumerate(found, start=1):
        for one in output.outputs:
            place = f"{number}.{one.index + 1}" if len(output.outputs) > 1 else f"{number}"
            out.line(f"[{place}] {output.prompt or ' '.join(map(str, output.prompt_token_ids))}", SOFT)
            out.stream(f"{llm.shown(one)}\n")
    return found


def told(out: Output, model: str, llm: LLM, found: Sequence[RequestOutput], seconds: float) -> int:
    """Print the document or the speed, and what went wrong; return the exit code."""
    has_text = llm.engine.tokenizer is not None
    documents = [document(model, output, one, has_text=has_text) for output in found for one in output.outputs]
    if out.flags.json:
        out.json(documents if len(documents) > 1 else documents[0])
    num_tokens = sum(output.num_output_tokens for output in found)
    if len(documents) > 1:
        out.note(f"{len(documents)} texts, {num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s")
    else:
        ms = (found[0].metrics or {}).get("first_token_s", 0.0) * 1000
        out.note(f"{num_tokens} tokens, first after {ms:.0f} ms, then {found[0].tokens_per_s:.1f} tokens/s")
    failed = [output.error for output in found if output.error]
    if failed:
        raise FirstlightError(
            f"{len(failed)} of {len(found)} requests failed", why=failed[0], exit_code=EXIT_CHECK_FAILED
        )
    return EXIT_OK


def document(model: str, output: RequestOutput, one: CompletionOutput, *, has_text: bool) -> dict[str, Any]:
    """Return a continuation as JSON-ready data."""
    found: dict[str, Any] = {
        "model": model,
        "prompt": output.prompt,
        "prompt_ids": list(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "index": one.index,
        "text": one.text if has_text else None,
        "ids": list(one.token_ids),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "first_token_s": (output.metrics or {}).get("first_token_s", 0.0),
        "tokens_per_s": output.tokens_per_s,
    }
    if one.logprobs is not None:
        found["logprobs"] = [
            {str(token): {"logprob": p.logprob, "rank": p.rank, "text": p.decoded_token} for token, p in entry.items()}
            for entry in one.logprobs
        ]
    return found
