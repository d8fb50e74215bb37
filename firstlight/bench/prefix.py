"""A prefix that many requests share: how much sooner they start, and how often its pages are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from firstlight.bench.latency import random_prompts
from firstlight.bench.report import Row
from firstlight.engine.llm import LLM
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampling_params import SamplingParams

TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """num_prompts prompts that share input_len tokens and differ in the TAIL_TOKENS after them."""

    case: str
    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


def prefix(build: Callable[[bool], LLM], shared: Shared) -> list[Row]:
    """Return one row: milliseconds to the first token with the prefix cached, against without a cache.

    build: makes an LLM with, or without, a prefix cache. pages: held at once at most, over all roles; stored apart, the
    requests would hold pages_apart.
    """
    warm, pages, pages_apart = served(build(True), shared)
    cold, _, _ = served(build(False), shared)
    same = [output.outputs[0].token_ids for output in warm] == [output.outputs[0].token_ids for output in cold]
    more = {
        "pages": pages,
        "pages_apart": pages_apart,
        "cached_tokens": sum(output.num_cached_tokens for output in warm),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in warm),
    }
    case = f"{shared.case} {shared.num_prompts} x in{shared.input_len}+{TAIL_TOKENS} out{shared.output_len}"
    return [
        Row(
            op="prefix_ttft",
            case=case,
            ms=first_ms(warm),
            baseline={"no cache": first_ms(cold)},
            correct=same,
            more=more,
        )
    ]


def served(llm: LLM, shared: Shared) -> tuple[list[RequestOutput], int, int]:
    """Return the outputs of the prompts, the most pages held at once, and the pages of all prompts stored apart.

    A prompt more, run alone before them, has left the prefix behind.
    """
    (head,) = random_prompts([shared.input_len], llm, seed=shared.seed)
    tails = random_prompts([TAIL_TOKENS] * (shared.num_prompts + 1), llm, seed=shared.seed + 1)
    params = SamplingParams(temperature=0.0, max_tokens=shared.output_len, ignore_eos=True, detokenize=False)
    llm.generate([[*head, *tails[0]]], params, use_tqdm=False)
    engine, pages = llm.engine, 0
    blocks = engine.runner.pool.blocks
    ids = [engine.add([*head, *tail], params) for tail in tails[1:]]
    while engine.has_work:
        engine.step()
        pages = max(pages, sum(role.pool.num_held for role in blocks.roles.values()))
    # the last token is never read back
    length = shared.input_len + TAIL_TOKENS + shared.output_len - 1
    apart = shared.num_prompts * sum(blocks.pages_for(name, length) for name in blocks.roles)
    outputs = [engine.pop(request_id) for request_id in ids]
    llm.close()
    return outputs, pages, apart


def first_ms(outputs: list[RequestOutput]) -> float:
    """Return the median of milliseconds to the first token."""
    return median((output.metrics or {})["first_token_s"] for output in outputs) * 1000
