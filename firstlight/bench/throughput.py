"""Many sequences of mixed length at once, against the baseline called once per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median

from firstlight.bench.baseline import Baseline, Continued
from firstlight.bench.latency import ending_ids, num_tokens, random_prompts, run, speeds
from firstlight.bench.report import Row
from firstlight.engine.llm import LLM

SHORTEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """num_prompts prompts of SHORTEST to input_len tokens, all there from the start."""

    case: str
    num_prompts: int
    input_len: int
    output_len: int
    num_iters: int = 2
    ignore_eos: bool = True
    seed: int = 0


def throughput(llm: LLM, baseline: Baseline | None, stream: Stream) -> list[Row]:
    """Return one row: milliseconds until all are done, and tokens per second. Both sides take turns."""
    run(llm, random_prompts([stream.input_len], llm, seed=-1), 2, ignore_eos=True)
    ours: list[Continued] = []
    theirs: list[Continued] = []
    wrong: list[str] = []
    for turn in range(stream.num_iters):
        seed = stream.seed + turn
        prompts = random_prompts(mixed_lengths(stream, seed), llm, seed=seed)
        ours.append(run(llm, prompts, stream.output_len, ignore_eos=stream.ignore_eos))
        if baseline is not None:
            theirs.append(one_by_one(baseline, prompts, stream.output_len, ending_ids(llm, stream.ignore_eos)))
            wrong += baseline.differences(prompts, ours[-1].ids, theirs[-1].ids)
    return [
        Row(
            op="throughput",
            case=f"{stream.case} {stream.num_prompts} x in{SHORTEST}-{stream.input_len} out{stream.output_len}",
            ms=median(one.total_s for one in ours) * 1000,
            baseline={f"{baseline.name} one by one": median(o.total_s for o in theirs) * 1000} if baseline else {},
            correct=not wrong if baseline else None,
            more={**speeds(ours, theirs), "num_tokens": num_tokens(ours[0]), "differences": wrong},
        )
    ]


def mixed_lengths(stream: Stream, seed: int) -> list[int]:
    """Return the lengths of the prompts, spread evenly, in random order."""
    first, last = min(SHORTEST, stream.input_len), stream.input_len
    steps = max(1, stream.num_prompts - 1)
    lengths = [first + (last - first) * index // steps for index in range(stream.num_prompts)]
    Random(seed).shuffle(lengths)
    return lengths


def one_by_one(baseline: Baseline, prompts: list[list[int]], output_len: int, eos_ids: tuple[int, ...]) -> Continued:
    """Return what the baseline makes of the prompts, one call after another."""
    parts = [baseline.generate([prompt], output_len, eos_ids) for prompt in prompts]
    return Continued([part.ids[0] for part in parts], parts[0].first_s, sum(part.total_s for part in parts))
