"""One sequence, or one batch of equal length: time to the first token, and per token after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from firstlight.bench.baseline import Baseline, Continued
from firstlight.bench.report import Row
from firstlight.engine.llm import LLM
from firstlight.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both sides. case: how the model and its format are named in the rows."""

    case: str
    input_len: int
    output_len: int
    batch_size: int = 1
    num_iters: int = 5
    ignore_eos: bool = True
    seed: int = 0


def latency(llm: LLM, baseline: Baseline | None, load: Load) -> list[Row]:
    """Return rows ttft, tpot and latency. Both sides take turns on fresh prompts; the first turn warms up."""
    ours: list[Continued] = []
    theirs: list[Continued] = []
    wrong: list[str] = []
    for turn in range(load.num_iters + 1):
        prompts = random_prompts([load.input_len] * load.batch_size, llm, seed=load.seed + turn)
        ours.append(run(llm, prompts, load.output_len, ignore_eos=load.ignore_eos))
        if baseline is not None:
            theirs.append(baseline.generate(prompts, load.output_len, ending_ids(llm, load.ignore_eos)))
            wrong += baseline.differences(prompts, ours[-1].ids, theirs[-1].ids)
    case = f"{load.case} b{load.batch_size} in{load.input_len} out{load.output_len}"
    rows = []
    for op, read in (("ttft", first_ms), ("tpot", per_token_ms), ("latency", total_ms)):
        times = median(map(read, ours[1:]))
        other = {baseline.name: median(map(read, theirs[1:]))} if baseline else {}
        more = speeds(ours[1:], theirs[1:]) if op == "latency" else {}
        correct = not wrong if baseline else None
        rows.append(
            Row(op=op, case=case, ms=times, baseline=other, correct=correct, more={**more, "differences": wrong})
        )
    return rows


def speeds(ours: Sequence[Continued], theirs: Sequence[Continued]) -> dict[str, float]:
    """Return the median of new tokens per second, prompt included in the time, of each side."""
    found = {"tokens_per_s": median(num_tokens(one) / one.total_s for one in ours)}
    if theirs:
        found["baseline_tokens_per_s"] = median(num_tokens(one) / one.total_s for one in theirs)
    return found


def run(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int, *, ignore_eos: bool) -> Continued:
    """Return what our engine continues prompts with, greedily, all of them at once."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=ignore_eos, detokenize=False)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise RuntimeError(failed[0])
    times = [output.metrics or {} for output in outputs]
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return Continued(ids, max(t["first_token_s"] for t in times), max(t["last_token_s"] for t in times))


def random_prompts(lengths: Sequence[int], llm: LLM, *, seed: int) -> list[list[int]]:
    """Return a prompt of random ids per length."""
    random, vocab_size = Random(seed), llm.engine.runner.vocab_size
    return [[random.randrange(vocab_size) for _ in range(length)] for length in lengths]


def ending_ids(llm: LLM, ignore_eos: bool) -> tuple[int, ...]:
    """Return the ids that end a text, none if they are to be ignored."""
    return () if ignore_eos or llm.engine.tokenizer is None else llm.engine.tokenizer.eos_ids


def num_tokens(one: Continued) -> int:
    """Return the new tokens of all sequences."""
    return sum(map(len, one.ids))


def first_ms(one: Continued) -> float:
    """Return milliseconds to the first token."""
    return one.first_s * 1000


def total_ms(one: Continued) -> float:
    """Return milliseconds to the last token."""
    return one.total_s * 1000


def per_token_ms(one: Continued) -> float:
    """Return milliseconds per token after the first, of the longest sequence."""
    return (one.total_s - one.first_s) / max(1, max(map(len, one.ids)) - 1) * 1000
