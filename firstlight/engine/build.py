"""EngineArgs -> Engine: weights loaded, arenas sized, scheduler and prefix cache over them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from firstlight.engine.args import EngineArgs
from firstlight.engine.assemble import Declared, build_runner
from firstlight.engine.core import Engine, EngineConfig
from firstlight.engine.scheduler import SchedulerConfig
from firstlight.errors import FirstlightError
from firstlight.plan.arenas import ArenaSizes, size_arenas
from firstlight.plan.planner import Plan
from firstlight.text.tokenizer import Tokenizer
from firstlight.weights.report import LoadReport

__all__ = ["EngineArgs", "build_engine", "has_tokenizer"]

# without a device of its own a cache shares the machine's memory; more is had by asking
CPU_CACHE_BYTES = 4 << 30


def build_engine(
    declared: Declared, plan: Plan, args: EngineArgs, *, progress: Callable[[int], None] | None = None
) -> tuple[Engine, LoadReport, ArenaSizes]:
    """Return an Engine for a model under a Plan. progress: bytes of weights as they load. Raises: FirstlightError."""
    folder = declared.source.require_folder("running a model")
    tokenizer = Tokenizer.load(folder) if has_tokenizer(folder) else None
    max_model_len = model_len(declared, args)
    sizes = arena_sizes(declared, plan, args, max_model_len)
    vocab_size = declared.arch.vocab_size
    runner, report = build_runner(
        declared,
        plan,
        num_tokens=sizes.num_tokens,
        num_slots=sizes.num_slots,
        vocab_size=min(tokenizer.vocab_size, vocab_size) if tokenizer else vocab_size,
        poison=args.poison,
        progress=progress,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        checkpoint_tokens=args.checkpoint_tokens,
    )
    sizes = replace(sizes, bytes=runner.pool.bytes)
    config = EngineConfig(
        max_model_len=max_model_len,
        scheduler=scheduler,
        enable_prefix_caching=args.enable_prefix_caching,
        overlap=overlaps(args, plan.device),
        seed=args.seed,
    )
    return Engine(runner, tokenizer, config), report, sizes


def overlaps(args: EngineArgs, device: str) -> bool:
    """Return whether a step is planned while the one before runs. On a CPU both compete for the same cores and the
    interpreter: planning in turn is 9% faster with 1 sequence and 17% with 32 (embedded model, 2 cores, 1 thread)."""
    return device != "cpu" if args.overlap is None else args.overlap


def model_len(declared: Declared, args: EngineArgs) -> int:
    """Return the context length that is served. Raises: FirstlightError for more than the model has."""
    most = declared.arch.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > most:
        raise FirstlightError(
            f"max_model_len={args.max_model_len} is more than the model has",
            where=declared.source.where,
            why=f"max_position_embeddings is {most}",
            fix=f"max_model_len={most}",
        )
    return args.max_model_len or most


def arena_sizes(declared: Declared, plan: Plan, args: EngineArgs, max_model_len: int) -> ArenaSizes:
    """Return the sizes asked for, or the largest useful ones within the budget."""
    decls = [layer.mixer.declare(plan.precision.cache_dtypes()) for layer in declared.arch.layers]
    has_states = any(decl.states for decl in decls)
    sizes = size_arenas(
        decls,
        budget_bytes=cache_budget(plan.device, args.gpu_memory_utilization),
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        checkpoints=args.enable_prefix_caching and has_states,
    )
    num_tokens = args.cache_tokens or sizes.num_tokens
    num_slots = args.state_slots or sizes.num_slots
    return ArenaSizes(
        num_tokens=num_tokens,
        num_slots=num_slots,
        max_num_seqs=min(sizes.max_num_seqs, num_slots),
        bytes=sizes.bytes,
        notices=sizes.notices,
    )


def cache_budget(device: str, utilization: float) -> int:
    """Return the bytes that caches may take on a device."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * utilization)
    return min(CPU_CACHE_BYTES, int(available_bytes() * utilization))


def available_bytes() -> int:
    """Return the memory that this machine can give without swapping; where it does not tell, the usual CPU limit."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else CPU_CACHE_BYTES


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("*.tiktoken")) or (folder / "vocab.json").is_file()
