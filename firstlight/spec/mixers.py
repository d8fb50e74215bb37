"""Token mixers as data: attention, latent attention with an optional index, delta-rule and state-space recurrence.

Each noun names the operators it needs (`operators`) and the memory it keeps (`declare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firstlight.spec.caches import (
    PAGE_TOKENS,
    CacheDecl,
    CacheDtypes,
    PerDraftToken,
    PerSequence,
    PerToken,
)
from firstlight.spec.choices import check_choices
from firstlight.spec.norm import Norm, Rope
from firstlight.spec.noun import NewNoun, Nothing

INDEX_KEY_NORM = Norm(kind="layer", eps=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """Elementwise gate on a mixer's output.

    source: a projection of the hidden state, or q_proj, which then emits [q, gate] for each head (attention only).
    rank: width of a low-rank projection of the hidden state, None = full.
    """

    act: Literal["sigmoid", "silu"]
    source: Literal["hidden", "q_proj"] = "hidden"
    rank: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        if self.source == "q_proj" and self.rank is not None:
            raise ValueError(f"a gate that q_proj emits has no low-rank projection, got rank={self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GQAttention:
    """Grouped-query attention over keys and values of every earlier token (or the last `sliding_window`).

    qk_norm: on each head of q and k, before the rotation; a gate beside q is not normed.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scaling: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    output_gate: OutputGate | None = None
    sinks: bool = False
    sliding_window: int | None = None
    bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        _require_multiple(self, "num_attention_heads", "num_key_value_heads")
        _require_rotation(self.rope, self.head_dim, f"{type(self).__name__}.head_dim")

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this mixer calls."""
        names = ["linear", "cache_write", "attention"]
        names += [] if self.qk_norm is None else ["layer_norm" if self.qk_norm.kind == "layer" else "rms_norm"]
        names += ["rope"] if self.rope else []
        names += ["output_gate"] if self.output_gate else []
        return tuple(names)

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """Keys and values, one entry [2, heads, head_dim] per token."""
        shape = (2, self.num_key_value_heads, self.head_dim)
        return CacheDecl(pages=(PerToken(name="kv", shape=shape, dtype=dtypes.kv),))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPool:
    """Index keys pooled over `size` tokens by a softmax gate with a position bias.

    Only complete pools compete; the incomplete tail is always selected when `always_tail`.
    """

    size: int
    always_tail: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Scores the whole history and keeps `topk` tokens; ties keep the smaller position.

    full: owns weights and an index cache. shared: reuses the set of the last full layer.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope: Rope | None = None
    key_norm: Norm = INDEX_KEY_NORM
    pool: KeyPool | None = None
    mode: Literal["full", "shared"] = "full"

    def __post_init__(self) -> None:
        check_choices(self)

    @property
    def width(self) -> int:
        """Columns of the selection, -1 padded."""
        return self.topk + (self.pool.size - 1 if self.pool and self.pool.always_tail else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAttention:
    """Latent attention: one cached row [kv_lora_rank + qk_rope_head_dim] per token serves all heads.

    rope None with qk_rope_head_dim > 0 keeps those key columns unrotated.
    """

    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    scaling: float
    q_lora_rank: int | None = None
    rope: Rope | None = None
    output_gate: OutputGate | None = None
    indexer: Indexer | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        _require_hidden_source(self.output_gate, type(self).__name__)
        _require_rotation(self.rope, self.qk_rope_head_dim, f"{type(self).__name__}.qk_rope_head_dim")
        if self.bias and self.q_lora_rank is None:
            raise ValueError("bias belongs to q_a_proj, kv_a_proj and o_proj: a query of full rank has none")

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this mixer calls."""
        names = ["linear", "rms_norm", "cache_write", "sparse_mla" if self.indexer else "mla"]
        names += ["rope"] if self.rope else []
        names += ["output_gate"] if self.output_gate else []
        if self.indexer and self.indexer.mode == "full":
            names += ["layer_norm", "index_topk"]
            names += ["rope"] if self.indexer.rope and not self.rope else []
            names += ["index_pool"] if self.indexer.pool else []
        return tuple(names)

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """Latent rows; with a full indexer also index keys and, when pooled, the open pool's raw rows."""
        pages = [PerToken(name="latent", shape=(self.latent_dim,), dtype=dtypes.kv)]
        states: tuple[PerSequence, ...] = ()
        indexer = self.indexer
        if indexer and indexer.mode == "full":
            size = indexer.pool.size if indexer.pool else 1
            # the smallest multiple of the pool that is not below the usual page
            page_tokens = -(-PAGE_TOKENS // size) * size
            pages.append(
                PerToken(
                    name="index",
                    shape=(indexer.head_dim,),
                    dtype=dtypes.index,
                    tokens_per_entry=size,
                    page_tokens=page_tokens,
                )
            )
            if indexer.pool:
                # [position % size, key | gate, head_dim]
                states = (
                    PerSequence(name="index_tail", shape=(size, 2, indexer.head_dim), dtype=dtypes.index, kind="ring"),
                )
        return CacheDecl(pages=tuple(pages), states=states, grid=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay:
    """Log decay of a delta rule, fp32.

    softplus: -exp(A_log) softplus(z + dt_bias). bounded: lower_bound * sigmoid(exp(A_log) (z + dt_bias)).
    rank: width of the low-rank projection that makes z, None = full.
    """

    granularity: Literal["head", "channel"]
    form: Literal["softplus", "bounded"]
    lower_bound: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        if (self.form == "bounded") != (self.lower_bound is not None):
            bound = self.lower_bound
            raise ValueError(
                f"a bounded decay alone has a bound, and needs one: got {self.form!r}, lower_bound={bound}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Gated delta rule: S <- Diag(exp g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q.

    One noun for KDA (decay per channel) and gated DeltaNet (decay per head). q, k and v pass a
    depthwise causal convolution of width `conv_kernel_size` and silu first.

    qkv_layout, the order of the projections' rows, with z the output gate, b the write strength and a the decay:
    separate: one projection each. qkv_z_b_a: q, k and v in one. qkvz_grouped: two, in groups of one key head
    and the r value heads it serves, [q, k, v (r heads), z (r heads)] and [b (r), a (r)].
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    decay: Decay
    output_gate: OutputGate
    norm_eps: float
    qkv_layout: Literal["separate", "qkvz_grouped", "qkv_z_b_a"] = "separate"

    def __post_init__(self) -> None:
        check_choices(self)
        _require_hidden_source(self.output_gate, type(self).__name__)
        _require_multiple(self, "num_v_heads", "num_k_heads")
        low_rank = self.decay.rank is not None or self.output_gate.rank is not None
        if self.qkv_layout == "qkvz_grouped" and (low_rank or self.decay.granularity != "head"):
            raise ValueError("qkvz_grouped holds one decay per head and full-rank gates")

    @property
    def key_dim(self) -> int:
        """Channels of all key heads."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Channels of all value heads."""
        return self.num_v_heads * self.head_v_dim

    @property
    def decay_dim(self) -> int:
        """Decays of one token."""
        return self.num_v_heads * (self.head_k_dim if self.decay.granularity == "channel" else 1)

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v concatenated."""
        return 2 * self.key_dim + self.value_dim

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this mixer calls."""
        return ("linear", "short_conv", "decay_gate", "delta_rule", "gated_rms_norm")

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """State stored [heads, V, K], the convolution window, and the raw inputs a draft token leaves."""
        window = PerSequence(
            name="conv", shape=(self.conv_kernel_size - 1, self.conv_dim), dtype=dtypes.kv, kind="window"
        )
        shape = (self.num_v_heads, self.head_v_dim, self.head_k_dim)
        state = PerSequence(name="recurrent", shape=shape, dtype=dtypes.state, kind="recurrent")
        records = (
            PerDraftToken(name="conv_input", shape=(self.conv_dim,), dtype=dtypes.kv),
            PerDraftToken(name="decay", shape=(self.decay_dim,), dtype="float32"),
            PerDraftToken(name="beta", shape=(self.num_v_heads,), dtype="float32"),
        )
        # 64: the chunk of the prefill scan, where a state exists anyway
        return CacheDecl(states=(state, window), records=records, grid=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """State space: S <- exp(dt A) S + (dt x) B^T; y = S C + D x, with A = -exp(A_log) and S [head_dim, state_size].

    One projection makes [z, x, B, C, dt]. x, B and C pass a depthwise causal convolution of width `conv_kernel_size`
    and silu first. Each group of B and C serves consecutive heads. dt = max(softplus(dt + dt_bias), dt_min).
    The output is w rms(y silu(z)), the rms over the channels of a group.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel_size: int
    norm_eps: float
    conv_bias: bool = True
    dt_min: float = 0.0

    def __post_init__(self) -> None:
        _require_multiple(self, "num_heads", "num_groups")
        if self.dt_min < 0:
            raise ValueError(f"a time step is never negative, got dt_min={self.dt_min}")

    @property
    def value_dim(self) -> int:
        """Channels of x, z and y."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C concatenated."""
        return self.value_dim + 2 * self.num_groups * self.state_size

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this mixer calls."""
        return ("linear", "short_conv", "mamba2", "gated_rms_norm")

    def declare(self, dtypes: CacheDtypes) -> CacheDecl:
        """State stored [heads, head_dim, state_size], the convolution window, and what a draft token leaves."""
        window = PerSequence(
            name="conv", shape=(self.conv_kernel_size - 1, self.conv_dim), dtype=dtypes.kv, kind="window"
        )
        shape = (self.num_heads, self.head_dim, self.state_size)
        state = PerSequence(name="recurrent", shape=shape, dtype=dtypes.state, kind="recurrent")
        records = (
            PerDraftToken(name="conv_input", shape=(self.conv_dim,), dtype=dtypes.kv),
            PerDraftToken(name="dt", shape=(self.num_heads,), dtype="float32"),
        )
        # 64: the chunk of the prefill scan, where a state exists anyway
        return CacheDecl(states=(state, window), records=records, grid=64)


def _require_hidden_source(gate: OutputGate | None, owner: str) -> None:
    if gate is not None and gate.source != "hidden":
        raise ValueError(f"the output gate of {owner} reads the hidden state, not {gate.source}")


def _require_multiple(noun: GQAttention | DeltaRule | Mamba2, heads: str, shared: str) -> None:
    if getattr(noun, heads) % getattr(noun, shared):
        raise ValueError(f"{heads}={getattr(noun, heads)} is not a multiple of {shared}={getattr(noun, shared)}")


def _require_rotation(rope: Rope | None, width: int, owner: str) -> None:
    if rope is not None and rope.dim > width:
        raise ValueError(f"rope turns {rope.dim} dimensions of {owner}={width}")


Mixer = GQAttention | MLAttention | DeltaRule | Mamba2 | NewNoun | Nothing
