"""The flags that several verbs share, a dataclass per concern; defaults live here and nowhere else.

Imports nothing heavy: rooms are imported inside the methods that need them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.engine.args import EngineArgs
from firstlight.errors import FirstlightError

if TYPE_CHECKING:
    from firstlight.engine.assemble import Declared
    from firstlight.plan.planner import Plan, Planner
    from firstlight.quant.policy import PrecisionPolicy

DEMO = "demo"
ENGINE = EngineArgs()
OVERRIDE = re.compile(r"(?:(?P<layer>\d+):)?(?:(?P<stage>[a-z]+):)?(?P<op>\w+)=(?P<impl>[\w.-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Which model, and how strictly its config.json is read."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="demo, a folder, a config.json, a card, or a hub id.")
    ] = DEMO
    port: Annotated[
        Path | None, typer.Option("--port", metavar="FILE.py", help="A port outside the package: arch and NAMES.")
    ] = None
    allow_unknown_keys: Annotated[
        bool, typer.Option("--allow-unknown-keys", help="Let unread keys of config.json pass; recorded in the report.")
    ] = False

    def declare(self, *, config_only: bool = False) -> Declared:
        """Return the model taken apart. Raises: FirstlightError."""
        from firstlight.engine.assemble import declare

        return declare(
            self.model, port_file=self.port, allow_unknown_keys=self.allow_unknown_keys, config_only=config_only
        )

    def words(self) -> tuple[str, ...]:
        """Return the flags that a command repeating this one must be given, MODEL excepted."""
        port = ("--port", str(self.port)) if self.port else ()
        return (*port, *(("--allow-unknown-keys",) if self.allow_unknown_keys else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """How a verb speaks."""

    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bars, notices or warnings.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Stack traces with errors.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What the planner is asked for."""

    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="[LAYER:][STAGE:]OP=IMPL", help="Run this body. Repeatable."),
    ] = None
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Run exactly this plan.")] = None
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        typer.Option("--kv-cache-dtype", metavar="TYPE", help="Of keys, values, latents."),
    ] = "auto"
    index_dtype: Annotated[str, typer.Option("--index-dtype", metavar="TYPE", help="Of index keys.")] = "auto"
    state_dtype: Annotated[str, typer.Option("--state-dtype", metavar="TYPE", help="Of recurrent states.")] = "float32"
    graph_mode: Annotated[
        bool,
        typer.Option("--graph-mode/--enforce-eager", help="Whole steps as graphs, or one by one."),
    ] = False
    parallel: Annotated[
        str,
        typer.Option("--parallel", metavar="AXES", help='Axes that may be used: "TP+EP+PP".'),
    ] = ""
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", "--tp-size", metavar="N", help="Devices that share every matrix."
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", metavar="N", help="Devices that share the layers.")
    ] = 1
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", metavar="N", help="Copies of the model.")
    ] = 1
    prefill_context_parallel_size: Annotated[
        int, typer.Option("--prefill-context-parallel-size", metavar="N", help="Devices that share a prompt.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Experts spread over the devices.")
    ] = False

    def build(self, declared: Declared) -> Plan:
        """Return the Plan asked for. Raises: FirstlightError."""
        if self.plan is not None:
            return self._stored(declared, self.plan)
        planner = declared.planner()
        for text in self.op or ():
            bind(planner, text)
        return planner.build(
            parallel=self.axes(),
            graph_mode=self.graph_mode,
            precision=self.precision(declared),
            unknown_keys=declared.unknown_keys,
        )

    def _stored(self, declared: Declared, path: Path) -> Plan:
        from firstlight.plan.stored import read_plan

        if replace(self, plan=None) != PlanFlags():
            raise FirstlightError(
                "--plan goes with no other flag of the plan",
                where=f"--plan {path}",
                why="the file says all of it: bodies, formats, parallel layout",
                fix="edit the file, or drop --plan",
            )
        plan = read_plan(path, declared.arch, declared.table)
        return replace(plan, unknown_keys=tuple(sorted({*plan.unknown_keys, *declared.unknown_keys})))

    def precision(self, declared: Declared) -> PrecisionPolicy:
        """Return the formats; auto is that of the config. Raises: FirstlightError."""
        from firstlight.quant.policy import PrecisionPolicy

        if self.dtype == "auto":
            check_dtype(declared.arch.dtype, where=declared.source.where)
        return PrecisionPolicy(
            backbone=declared.arch.dtype if self.dtype == "auto" else self.dtype,
            kv_cache=self.kv_cache_dtype,
            index=self.index_dtype,
            state=self.state_dtype,
        )

    def axes(self) -> str:
        """Return the parallel layout as the planner reads it: "TP=2+EP"."""
        sizes = {
            "TP": self.tensor_parallel_size,
            "PP": self.pipeline_parallel_size,
            "DP": self.data_parallel_size,
            "CP": self.prefill_context_parallel_size,
        }
        asked = [self.parallel, *(f"{axis}={size}" for axis, size in sizes.items() if size != 1)]
        return "+".join(filter(None, [*asked, "EP" if self.enable_expert_parallel else ""]))

    def words(self) -> tuple[str, ...]:
        """Return the flags that a command repeating this plan's bodies must be given."""
        ops = [word for text in self.op or () for word in ("--op", text)]
        return (*ops, *(("--plan", str(self.plan)) if self.plan else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """What a run is limited to and seeded with."""

    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of every random choice.")] = 0
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="N", help="Longest context; the model's own by default.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """What the engine may use; defaults are those of EngineArgs."""

    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", metavar="N", help="Sequences that run at once.")] = (
        ENGINE.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", metavar="N", help="Tokens in one step.")
    ] = ENGINE.max_num_batched_tokens
    enable_prefix_caching: Annotated[
        bool,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Compute shared prefixes once."),
    ] = ENGINE.enable_prefix_caching
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", metavar="X", help="Share of free memory for caches.")
    ] = ENGINE.gpu_memory_utilization

    def args(self, run: RunFlags) -> EngineArgs:
        """Return what an engine is limited to. Raises: FirstlightError."""
        return EngineArgs(
            max_model_len=run.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            gpu_memory_utilization=self.gpu_memory_utilization,
            seed=run.seed,
        )


def limited(declared: Declared, max_model_len: int | None) -> Declared:
    """Return the declaration with a shorter context. Raises: FirstlightError for a longer one."""
    most = declared.arch.max_position_embeddings
    if max_model_len is None:
        return declared
    if not 1 <= max_model_len <= most:
        raise FirstlightError(
            f"--max-model-len {max_model_len} is out of range",
            where=declared.source.where,
            why=f"max_position_embeddings: the model takes 1 to {most} tokens",
            fix=f"--max-model-len {most}",
        )
    return replace(declared, arch=replace(declared.arch, max_position_embeddings=max_model_len))


def check_dtype(dtype: str, *, where: str) -> None:
    """Check that a config.json asks for a format that can run. Raises: FirstlightError."""
    from firstlight.quant.policy import DTYPES

    if dtype not in DTYPES:
        raise FirstlightError(
            f"dtype {dtype!r} of config.json is not supported",
            where=f"{where}  dtype",
            why=f"weights run as {', '.join(DTYPES)}",
            fix="--dtype bfloat16, if the weights are stored in one of these",
        )


def bind(planner: Planner, text: str) -> None:
    """Ask a planner for a body: "mla=absorbed", "3:mla=absorbed", "3:decode:mla=absorbed". Raises: FirstlightError."""
    found = OVERRIDE.fullmatch(text)
    if found is None:
        raise FirstlightError(
            f"--op {text} cannot be read",
            where=f"--op {text}",
            why="it is written [LAYER:][STAGE:]OP=IMPL",
            fix="--op mla=eager, or for one layer and stage --op 3:decode:mla=absorbed",
        )
    layer = None if found["layer"] is None else int(found["layer"])
    planner.bind(layer, found["stage"], found["op"], found["impl"])


def number_range(text: str, *, flag: str) -> range:
    """Return the range of "3", "0-7" or "1,2,3". Raises: FirstlightError where it is none or has gaps."""
    words = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text.replace(" ", ""))
    numbers: set[int] = set()
    for word in text.replace(" ", "").split(",") if words else ():
        first, _, last = word.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    found = range(min(numbers, default=0), max(numbers, default=-1) + 1)
    if not numbers or len(numbers) != len(found):
        raise FirstlightError(
            f"{flag} {text} cannot be read",
            where=f"{flag} {text}",
            why="it is a number or an unbroken range, lower end first",
            fix=f"{flag} 0-7, or {flag} 3",
        )
    return found


def token_ids(text: str, *, flag: str) -> tuple[int, ...]:
    """Return the ids of "1,2,3" or "1 2 3". Raises: FirstlightError."""
    words = re.split(r"\s*,\s*|\s+", text.strip()) if text.strip() else []
    if not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise FirstlightError(
            f"{flag} {text!r} cannot be read", where=flag, why="token ids are whole numbers", fix=f"{flag} 1,2,3"
        )
    return tuple(int(word) for word in words)
