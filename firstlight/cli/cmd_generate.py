"""generate: a prompt continued, as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.flags import ModelFlags, OutputFlags, PlanFlags, RunFlags, limited, token_ids
from firstlight.cli.output import Output
from firstlight.errors import EXIT_OK, FirstlightError

if TYPE_CHECKING:
    from pathlib import Path

    from firstlight.engine.completion import Completion, Prompt


def generate(
    model: ModelFlags,
    plan: PlanFlags,
    run: RunFlags,
    output: OutputFlags,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="IDS", help="The same as token ids: 1,2,3.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", help="0: always the likeliest.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", help="Least set of that probability.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", help="So many likeliest; 0: all.")] = 0,
) -> int:
    """Continue a prompt and print the text as it comes; tokens per second on stderr."""
    from firstlight.engine.completion import complete
    from firstlight.engine.sampler import SamplingParams
    from firstlight.plan.explain import memory

    out = Output(output)
    out.model(model.model, stderr=True)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=run.seed, max_tokens=max_tokens)
    declared = limited(model.declare(), run.max_model_len)
    made = plan.build(declared)
    given = read_prompt(declared.source.require_folder("generation"), prompt, prompt_ids, chat=chat)
    with out.bar("weights", memory(made, declared.arch).weight_bytes) as advance:
        completion = complete(declared, made, given, params, progress=advance)
    pieces = []
    for piece in completion:
        pieces.append(piece)
        out.stream(piece)
    if out.flags.json:
        out.json(document(model.model, completion, "".join(pieces)))
    out.line()
    ms = completion.first_token_s * 1000
    out.note(f"{len(completion.ids)} tokens, first after {ms:.0f} ms, then {completion.tokens_per_s:.1f} tokens/s")
    return EXIT_OK


def read_prompt(folder: Path, text: str | None, ids: str | None, *, chat: bool) -> Prompt:
    """Return the prompt of the flags. Raises: FirstlightError where there is none, or two."""
    from firstlight.engine.completion import Prompt

    if (text is None) == (ids is None):
        raise FirstlightError(
            "no prompt" if text is None else "two prompts",
            where="firstlight generate",
            why="exactly one of --prompt and --prompt-ids is continued",
            fix='-p "At first light"',
        )
    if ids is None:
        return Prompt.of_text(folder, text or "", chat=chat)
    if chat:
        raise FirstlightError(
            "--chat goes with text",
            where="--prompt-ids",
            why="a chat template renders text",
            fix="-p TEXT, or drop --chat",
        )
    return Prompt.of_ids(folder, token_ids(ids, flag="--prompt-ids"))


def document(model: str, completion: Completion, text: str) -> dict[str, Any]:
    """Return the completion as JSON-ready data."""
    return {
        "model": model,
        "prompt": completion.prompt.text,
        "prompt_ids": list(completion.prompt.ids),
        "text": text if completion.prompt.tokenizer else None,
        "ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "first_token_s": completion.first_token_s,
        "tokens_per_s": completion.tokens_per_s,
    }
