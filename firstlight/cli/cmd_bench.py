"""bench: how fast, against transformers on the same checkpoint and prompts."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.flags import EngineFlags, ModelFlags, OutputFlags, PlanFlags, RunFlags, limited
from firstlight.cli.output import BAD, GOOD, Cell, Output
from firstlight.errors import EXIT_CHECK_FAILED, EXIT_OK, FirstlightError, closest

if TYPE_CHECKING:
    from firstlight.bench.baseline import Baseline
    from firstlight.bench.report import Row
    from firstlight.engine.assemble import Declared
    from firstlight.engine.llm import LLM
    from firstlight.plan.planner import Plan

BENCHES = ("latency", "throughput", "prefix", "scheduler")
BASELINES = ("transformers", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """How much is measured; None: what suits the bench."""

    input_len: Annotated[
        int | None, typer.Option("--input-len", metavar="N", help="Tokens of a prompt; in throughput of the longest.")
    ] = None
    output_len: Annotated[int, typer.Option("--output-len", metavar="N", help="New tokens of each.")] = 32
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="latency: sequences at once.")] = 1
    num_iters: Annotated[
        int | None, typer.Option("--num-iters", metavar="N", help="Turns; the median counts. scheduler: steps.")
    ] = None
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", metavar="N", help="throughput, prefix, scheduler: sequences at once.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Go on after an end-of-text token.")
    ] = True
    baseline: Annotated[str, typer.Option("--baseline", metavar="NAME", help="transformers or none.")] = "transformers"
    save_result: Annotated[bool, typer.Option("--save-result", help="Keep the JSON as a file.")] = False
    result_dir: Annotated[
        Path | None,
        typer.Option("--result-dir", metavar="DIR", help="Where; benchmarks/results/cpu or gpu by default."),
    ] = None

    def check(self, what: str) -> None:
        """Check what is measured and how much. Raises: FirstlightError."""
        for value, choices, flag in ((what, BENCHES, "bench"), (self.baseline, BASELINES, "--baseline")):
            if value not in choices:
                near = closest(value, choices)
                fix = f"did you mean {near}?" if near else f"one of {', '.join(choices)}"
                raise FirstlightError(f"{flag} {value!r} does not exist", where=flag, why="it is no choice", fix=fix)
        for name in ("input_len", "output_len", "batch_size", "num_iters", "num_prompts"):
            value_n = getattr(self, name)
            if value_n is not None and value_n < 1:
                flag = f"--{name.replace('_', '-')}"
                raise FirstlightError(f"{flag} {value_n} is less than 1", where=flag, why="it is a count")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, and how."""

    declared: Declared
    plan: Plan
    flags: BenchFlags
    engine: EngineFlags
    run: RunFlags
    out: Output

    @property
    def case(self) -> str:
        """Model and format, as rows name them."""
        return f"{self.declared.source.name} {self.plan.precision.backbone}"

    def llm(self, *, num_seqs: int, cached: bool | None = None) -> LLM:
        """Return the model loaded, for so many sequences at once."""
        from firstlight.engine.llm import LLM
        from firstlight.plan.explain import memory

        args = replace(self.engine.args(self.run), max_num_seqs=max(num_seqs, self.engine.max_num_seqs))
        args = args if cached is None else replace(args, enable_prefix_caching=cached)
        with self.out.bar("weights", memory(self.plan, self.declared.arch).weight_bytes) as advance:
            return LLM.of(self.declared, self.plan, args, progress=advance)


def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="latency, throughput, prefix or scheduler.")],
    model: ModelFlags,
    plan: PlanFlags,
    run: RunFlags,
    engine: EngineFlags,
    flags: BenchFlags,
    output: OutputFlags,
) -> int:
    """Measure against transformers generate on the same checkpoint and prompts; the last line is the result as JSON."""
    flags.check(what)
    out = Output(output)
    out.model(model.model)
    # the scheduler is measured without weights
    declared = limited(model.declare(config_only=what == "scheduler"), run.max_model_len)
    out.notices(declared.port.notices)
    subject = Subject(declared, plan.build(declared), flags, engine, run, out)
    out.refusals(subject.plan)
    rows = MEASURES[what](subject)
    return told(subject, what, rows)


def measure_latency(subject: Subject) -> list[Row]:
    """Return the rows of `bench latency`."""
    from firstlight.bench.latency import Load, latency

    flags = subject.flags
    load = Load(
        case=subject.case,
        input_len=flags.input_len or 64,
        output_len=flags.output_len,
        batch_size=flags.batch_size,
        num_iters=flags.num_iters or 5,
        ignore_eos=flags.ignore_eos,
        seed=subject.run.seed,
    )
    return latency(subject.llm(num_seqs=load.batch_size), reference(subject), load)


def measure_throughput(subject: Subject) -> list[Row]:
    """Return the row of `bench throughput`."""
    from firstlight.bench.throughput import Stream, throughput

    flags = subject.flags
    stream = Stream(
        case=subject.case,
        num_prompts=flags.num_prompts or 32,
        input_len=flags.input_len or 256,
        output_len=flags.output_len,
        num_iters=flags.num_iters or 2,
        ignore_eos=flags.ignore_eos,
        seed=subject.run.seed,
    )
    return throughput(subject.llm(num_seqs=1), reference(subject), stream)


def measure_prefix(subject: Subject) -> list[Row]:
    """Return the row of `bench prefix`."""
    from firstlight.bench.prefix import TAIL_TOKENS, Shared, prefix

    flags, count = subject.flags, subject.flags.num_prompts or 32
    room = subject.declared.arch.max_position_embeddings - TAIL_TOKENS - flags.output_len
    shared = Shared(
        case=subject.case,
        num_prompts=count,
        input_len=flags.input_len or min(4096, room),
        output_len=flags.output_len,
        seed=subject.run.seed,
    )
    return prefix(lambda cached: subject.llm(num_seqs=count, cached=cached), shared)


def measure_scheduler(subject: Subject) -> list[Row]:
    """Return the row of `bench scheduler`."""
    from firstlight.bench.scheduling import Steps, scheduling

    flags = subject.flags
    steps = Steps(
        case=subject.declared.source.name, num_seqs=flags.num_prompts or 256, num_steps=flags.num_iters or 1000
    )
    return scheduling(subject.declared, subject.plan, steps)


MEASURES = {
    "latency": measure_latency,
    "throughput": measure_throughput,
    "prefix": measure_prefix,
    "scheduler": measure_scheduler,
}


def reference(subject: Subject) -> Baseline | None:
    """Return the baseline asked for, loaded."""
    if subject.flags.baseline == "none":
        return None
    from firstlight.bench.baseline import Baseline

    folder = subject.declared.source.require_folder("bench")
    return Baseline(folder, subject.plan.precision.backbone, subject.plan.device)


def told(subject: Subject, what: str, rows: list[Row]) -> int:
    """Print the table and the document, keep it if asked, and return the exit code."""
    from firstlight.bench.report import document, result_path, save

    out = subject.out
    print_rows(out, rows)
    data = document(shlex.join(["firstlight", *sys.argv[1:]]), rows, device=subject.plan.device)
    if subject.flags.save_result:
        path = result_path(subject.flags.result_dir, subject.plan.device, what, subject.case)
        save(data, path)
        out.note(f"kept as {path}")
    out.last_line(data)
    return EXIT_OK if all(row.correct is not False for row in rows) else EXIT_CHECK_FAILED


def print_rows(out: Output, rows: list[Row]) -> None:
    """Print ours, the baseline, the ratio, and whether the results were right."""
    import torch

    verdicts: dict[bool | None, Cell] = {True: ("yes", GOOD), False: ("NO", BAD), None: "-"}
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        name, ms = next(iter(row.baseline.items()), ("-", None))
        other = "-" if ms is None else f"{ms:.2f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
        cells.append((row.op, row.case, f"{row.ms:.2f}", other, name, ratio, verdicts[row.correct]))
    header = ("op", "case", "ms", "baseline ms", "baseline", "ratio", "correct")
    out.table(cells, header=header, right=(2, 3, 5))
    for row in rows:
        for name, value in row.more.items():
            if isinstance(value, int | float):
                out.line(f"{row.op} {name} {value:,.2f}".removesuffix(".00"))
    for line in rows[0].more.get("differences", []):
        out.line(f"first difference: {line}", BAD)
    out.line(f"torch threads {torch.get_num_threads()}, the same for both sides")
