"""What a model weighs, remembers and computes, from its ArchSpec alone.

FLOPs are those of one token that sees `context` tokens, itself included; a multiply-add counts 2.
They are 2 x the weights that the token multiplies with (router, convolution and head included, the
embedding lookup not) plus the work below. Norms, activations, rotations, softmax and top-k, all
below a percent, are not counted.

N heads, D head width, C latent width, R rotary width, K and V state widths, P pool size, M streams,
H hidden, B layers per block, n tokens attended to.

attention       4 N D n                 n = context, or the sliding window
MLA, absorbed   2 N (C + R) n + 2 N C n  scores and mixing on the cached rows; kv_b counts once, on the query's side
MLA, expanded   2 N (D_qk + D_v) n      keys and values already expanded, as in a long prefill
sparse MLA      as MLA absorbed         n = the selected tokens: min(topk, context), or whole pools and the open tail
index           2 N D entries           entries = context, or context // P
delta rule      7 K V per value head    decay 1, read 2, rank-one write 2, output 2
state space     5 K V per head          decay 1, rank-one write 2, output 2; the state is read once, after the write
hyper           4 M H + 2 M M H         per sub-layer: read a mix, write back through another
block residual  4 H sources             per sub-layer: one score and one weighted sum per earlier block
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections
from firstlight.spec.caches import DTYPE_BYTES, CacheDecl, CacheDtypes
from firstlight.spec.mixers import DeltaRule, GQAttention, Indexer, Mamba2, MLAttention
from firstlight.spec.noun import NewNoun
from firstlight.spec.parts import OUTSIDE, Part, parts, where, without_index
from firstlight.spec.shapes import part_weights

MlaForm = Literal["absorbed", "expanded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sizes and work that add up.

    active_parameters: read for one token; of the routed experts only the chosen ones, the embedding
    whole, as publishers count. cache_bytes_per_token grows with the context, state_bytes_per_sequence does not.
    """

    parameters: int = 0
    active_parameters: int = 0
    weight_bytes: int = 0
    flops_per_token: int = 0
    cache_bytes_per_token: float = 0
    state_bytes_per_sequence: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one part costs in all its places, or one layer in all its parts."""

    name: str
    where: str
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a model: in total, by part and by layer. parts add up to total; layers lack what is outside."""

    model_type: str
    context: int
    dtype: str
    caches: CacheDtypes
    mla: MlaForm
    total: Tally
    parts: tuple[Share, ...]
    layers: tuple[Share, ...]

    def flops_share(self, name: str) -> float:
        """Return the fraction of the FLOPs of a token that a part does. Raises: KeyError."""
        for share in self.parts:
            if share.name == name:
                return share.tally.flops_per_token / self.total.flops_per_token
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)


def contexts(arch: ArchSpec) -> tuple[int, ...]:
    """Return the contexts at which costs are told: 4k and 128k, or the longest that the model takes."""
    return tuple(sorted({min(context, arch.max_position_embeddings) for context in (4096, 131072)}))


def cost(
    arch: ArchSpec,
    *,
    context: int = 4096,
    dtype: str | None = None,
    caches: CacheDtypes | None = None,
    mla: MlaForm = "absorbed",
) -> Cost:
    """Return the cost of a model. dtype None: that of the config; caches None: that dtype, states in float32.

    Raises: ValueError for an unknown dtype or context < 1.
    """
    dtype = dtype or arch.dtype
    if dtype not in DTYPE_BYTES or context < 1:
        raise ValueError(
            f"no cost for dtype={dtype!r} at context={context}: dtypes are {', '.join(DTYPE_BYTES)}, context is >= 1"
        )
    caches = caches or CacheDtypes(kv=dtype, index=dtype)
    per_layer = [Tally() for _ in arch.layers]
    shares = []
    for part in parts(arch):
        whole = Tally()
        for place in part.places:
            tally = _tally(arch, part, place, context, DTYPE_BYTES[dtype], caches, mla)
            whole += tally
            if place != OUTSIDE:
                per_layer[place] += tally
        shares.append(Share(name=part.label, where=where(part.places, len(arch.layers)), tally=whole))
    total = sum((share.tally for share in shares), Tally())
    layers = tuple(Share(name=f"layer {i}", where=str(i), tally=tally) for i, tally in enumerate(per_layer))
    return Cost(
        model_type=arch.model_type,
        context=context,
        dtype=dtype,
        caches=caches,
        mla=mla,
        total=total,
        parts=tuple(shares),
        layers=layers,
    )


def _tally(
    arch: ArchSpec, part: Part, place: int, context: int, width: int, caches: CacheDtypes, mla: MlaForm
) -> Tally:
    weights = part_weights(arch, part, place)
    decl = declared(part, caches)
    work = mixing_flops(part, context, mla) + residual_flops(arch, part, place)
    return Tally(
        parameters=sum(weight.parameters for weight in weights),
        active_parameters=sum(weight.active for weight in weights),
        weight_bytes=sum(weight.parameters * (4 if weight.float32 else width) for weight in weights),
        flops_per_token=2 * sum(weight.multiply_adds for weight in weights) + work,
        cache_bytes_per_token=decl.bytes_per_token,
        state_bytes_per_sequence=decl.bytes_per_sequence,
    )


def declared(part: Part, caches: CacheDtypes) -> CacheDecl:
    """Return the memory of a part; that of an index branch is what its attention declares beyond the rest."""
    noun = part.noun
    if isinstance(noun, MLAttention):
        own = without_index(noun).declare(caches)
        if part.kind == "mixer":
            return own
        whole = noun.declare(caches)
        pages = tuple(page for page in whole.pages if page not in own.pages)
        return CacheDecl(pages=pages, states=tuple(state for state in whole.states if state not in own.states))
    return noun.declare(caches) if isinstance(noun, (GQAttention, DeltaRule, Mamba2, NewNoun)) else CacheDecl()


def visible_tokens(noun: GQAttention | MLAttention, context: int) -> int:
    """Return how many tokens the last of `context` tokens attends to."""
    if isinstance(noun, GQAttention):
        return min(context, noun.sliding_window or context)
    return context if noun.indexer is None else selected_tokens(noun.indexer, context)


def selected_tokens(indexer: Indexer, context: int) -> int:
    """Return how many tokens an indexer selects for the last of `context` tokens."""
    if indexer.pool is None:
        return min(indexer.topk, context)
    size = indexer.pool.size
    chosen = min(indexer.topk // size, context // size) * size
    return chosen + (context % size if indexer.pool.always_tail else 0)


def mixing_flops(part: Part, context: int, mla: MlaForm = "absorbed") -> int:
    """Return the FLOPs of one token that mix it with earlier ones; the formulas stand above."""
    noun = part.noun
    if isinstance(noun, GQAttention):
        return 4 * noun.num_attention_heads * noun.head_dim * visible_tokens(noun, context)
    if isinstance(noun, DeltaRule):
        return 7 * noun.num_v_heads * noun.head_k_dim * noun.head_v_dim
    if isinstance(noun, Mamba2):
        return 5 * noun.num_heads * noun.head_dim * noun.state_size
    if isinstance(noun, NewNoun):
        return noun.flops(context)
    if not isinstance(noun, MLAttention):
        return 0
    if part.kind == "index":
        assert noun.indexer is not None, "an index part has an indexer"
        entries = context // noun.indexer.pool.size if noun.indexer.pool else context
        return 2 * noun.indexer.num_heads * noun.indexer.head_dim * entries
    # each token selects its own rows, so that nothing expanded could be reused
    expanded = mla == "expanded" and noun.indexer is None
    width = noun.qk_head_dim + noun.v_head_dim if expanded else noun.latent_dim + noun.kv_lora_rank
    return 2 * noun.num_attention_heads * width * visible_tokens(noun, context)


def residual_flops(arch: ArchSpec, part: Part, place: int) -> int:
    """Return the FLOPs of one token in the residual topology of a place; plain addition counts nothing."""
    noun, hidden = part.noun, arch.hidden_size
    if isinstance(noun, HyperConnections):
        return 0 if place == OUTSIDE else 2 * (4 * noun.mult + 2 * noun.mult**2) * hidden
    if not isinstance(noun, BlockAttnRes):
        return 0
    if place == OUTSIDE:
        return 4 * hidden * (-(-len(arch.layers) // noun.block_size) + 1)
    mixer_sources = -(-place // noun.block_size) + 1
    return 4 * hidden * (2 * mixer_sources + (place % noun.block_size == 0))
