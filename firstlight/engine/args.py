"""EngineArgs: what an engine is limited to. Imports no torch: the command line reads its defaults here."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.errors import FirstlightError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What an engine is limited to; the names are vLLM's.

    max_model_len None: the model's own. gpu_memory_utilization: share of the free memory that caches may take (on a
    CPU at most 4 GiB). cache_tokens, state_slots: sizes given outright, for tests and for sharing a machine.
    checkpoint_tokens: a state checkpoint is kept every so many tokens. overlap, poison: see EngineConfig, CachePool;
    overlap None: only where planning and the model run on different processors.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    seed: int = 0
    cache_tokens: int | None = None
    state_slots: int | None = None
    checkpoint_tokens: int = 4096
    overlap: bool | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_tokens", "state_slots")
        for name in (*counts, "checkpoint_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise FirstlightError(f"{name} must be an integer >= 1, got {value!r}", where=name)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise FirstlightError(f"seed must be an integer >= 0 below 2^63, got {self.seed!r}", where="seed")
        if not isinstance(self.enable_prefix_caching, bool):
            raise FirstlightError(
                f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}",
                where="enable_prefix_caching",
            )
        if not isinstance(self.gpu_memory_utilization, (int, float)) or not 0 < self.gpu_memory_utilization <= 1:
            raise FirstlightError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}",
                where="gpu_memory_utilization",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise FirstlightError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}",
                where="max_num_batched_tokens",
                why="a step must hold a token of every running sequence",
            )
