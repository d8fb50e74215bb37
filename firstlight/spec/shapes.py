"""Shapes of the weights of every noun, named as the modules name them.

Enough to count parameters, bytes and multiply-adds of a model without building it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, MLAttention, OutputGate
from firstlight.spec.norm import Norm
from firstlight.spec.parts import OUTSIDE, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor, or `copies` alike (`{e}` in the name), of which a token reads `used`.

    multiplies: every element read costs one multiply-add per token. float32: kept so in any dtype.
    copies 0: stored elsewhere, such as a head tied to the embedding.
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    used: int = 1
    multiplies: bool = False
    float32: bool = False

    @property
    def parameters(self) -> int:
        """Elements stored."""
        return prod(self.shape) * self.copies

    @property
    def active(self) -> int:
        """Elements stored that one token reads."""
        return prod(self.shape) * min(self.used, self.copies)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one token."""
        return prod(self.shape) * self.used if self.multiplies else 0


Weights = tuple[Weight, ...]


def part_weights(arch: ArchSpec, part: Part, place: int) -> Weights:
    """Return the weights of a part in one of its places, named within the layer or, outside, the model."""
    if part.kind == "embedding":
        return (Weight(name="embed.weight", shape=(arch.vocab_size, arch.hidden_size)),)
    if part.kind == "head":
        return (
            replace(linear("head", arch.vocab_size, arch.hidden_size)[0], copies=0 if arch.tie_word_embeddings else 1),
        )
    return _noun_weights(part, place, arch.hidden_size)


def _noun_weights(part: Part, place: int, hidden: int) -> Weights:
    noun = part.noun
    names: tuple[str, ...]
    if isinstance(noun, Norm):
        names = ("norm",) if place == OUTSIDE else ("mixer_norm", "ffn_norm")
        return tuple(weight for name in names for weight in norm(name, hidden, noun.kind))
    if isinstance(noun, HyperConnections):
        names = () if place == OUTSIDE else ("mixer_residual", "ffn_residual")
        return tuple(weight for name in names for weight in hyper_connection(name, noun.mult, hidden))
    if isinstance(noun, BlockAttnRes):
        names = ("residual",) if place == OUTSIDE else ("mixer_residual", "ffn_residual")
        return tuple(
            weight for name in names for weight in norm(f"{name}.norm", hidden) + linear(f"{name}.proj", 1, hidden)
        )
    if isinstance(noun, MLAttention):
        found = index(noun, hidden) if part.kind == "index" else latent_attention(noun, hidden)
    elif isinstance(noun, GQAttention):
        found = attention(noun, hidden)
    elif isinstance(noun, DeltaRule):
        found = delta_rule(noun, hidden)
    else:
        assert isinstance(noun, (GLU, MoE)), f"{type(noun).__name__} has no weights"
        found = glu(noun.intermediate_size, hidden, bias=noun.bias) if isinstance(noun, GLU) else experts(noun, hidden)
    prefix = "ffn" if part.kind == "feed-forward" else "mixer.indexer" if part.kind == "index" else "mixer"
    return tuple(replace(weight, name=f"{prefix}.{weight.name}") for weight in found)


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Weights:
    """Return a projection, with its bias if any."""
    weight = Weight(name=f"{name}.weight", shape=(outputs, inputs), multiplies=True)
    return (weight, Weight(name=f"{name}.bias", shape=(outputs,))) if bias else (weight,)


def norm(name: str, dim: int, kind: str = "rms") -> Weights:
    """Return a norm's weight, and the bias of a LayerNorm."""
    weight = Weight(name=f"{name}.weight", shape=(dim,))
    return (weight, Weight(name=f"{name}.bias", shape=(dim,))) if kind == "layer" else (weight,)


def output_gate(gate: OutputGate | None, width: int, hidden: int) -> Weights:
    """Return the projections of a gate on `width` channels; none where q_proj emits it."""
    if gate is None or gate.source == "q_proj":
        return ()
    if gate.rank is None:
        return linear("g_proj", width, hidden)
    return linear("g_a_proj", gate.rank, hidden) + linear("g_b_proj", width, gate.rank)


def attention(noun: GQAttention, hidden: int) -> Weights:
    """Return the weights of grouped-query attention."""
    width, kv_width = noun.num_attention_heads * noun.head_dim, noun.num_key_value_heads * noun.head_dim
    q_width = 2 * width if noun.output_gate and noun.output_gate.source == "q_proj" else width
    found = linear("q_proj", q_width, hidden, bias=noun.bias)
    found += linear("k_proj", kv_width, hidden, bias=noun.bias) + linear("v_proj", kv_width, hidden, bias=noun.bias)
    if noun.qk_norm:
        found += norm("q_norm", noun.head_dim, noun.qk_norm.kind) + norm("k_norm", noun.head_dim, noun.qk_norm.kind)
    found += (Weight(name="sinks", shape=(noun.num_attention_heads,)),) if noun.sinks else ()
    return found + output_gate(noun.output_gate, width, hidden) + linear("o_proj", hidden, width, bias=noun.out_bias)


def latent_attention(noun: MLAttention, hidden: int) -> Weights:
    """Return the weights of latent attention without its index branch."""
    heads, rank = noun.num_attention_heads, noun.q_lora_rank
    q_width, width = heads * noun.qk_head_dim, heads * noun.v_head_dim
    if rank is None:
        found = linear("q_proj", q_width, hidden)
    else:
        found = (
            linear("q_a_proj", rank, hidden, bias=noun.bias)
            + norm("q_a_norm", rank)
            + linear("q_b_proj", q_width, rank)
        )
    found += linear("kv_a_proj", noun.latent_dim, hidden, bias=noun.bias) + norm("kv_a_norm", noun.kv_lora_rank)
    found += linear("kv_b_proj", heads * (noun.qk_nope_head_dim + noun.v_head_dim), noun.kv_lora_rank)
    return found + output_gate(noun.output_gate, width, hidden) + linear("o_proj", hidden, width, bias=noun.bias)


def index(noun: MLAttention, hidden: int) -> Weights:
    """Return the weights of an index branch: queries from the query latent, one key head, a weight per head."""
    indexer = noun.indexer
    assert indexer is not None, "an index part has an indexer"
    found = linear("q_proj", indexer.num_heads * indexer.head_dim, noun.q_lora_rank or hidden)
    found += linear("k_proj", indexer.head_dim, hidden) + norm("k_norm", indexer.head_dim, indexer.key_norm.kind)
    found += linear("weights_proj", indexer.num_heads, hidden)
    if indexer.pool:
        found += linear("gate_proj", indexer.head_dim, hidden)
        found += (Weight(name="position_bias", shape=(indexer.pool.size, indexer.head_dim), float32=True),)
    return found


def delta_rule(noun: DeltaRule, hidden: int) -> Weights:
    """Return the weights of a delta rule; its convolution, decay and norm stay fp32."""
    keys, values = noun.num_k_heads * noun.head_k_dim, noun.num_v_heads * noun.head_v_dim
    decays = noun.num_v_heads * (noun.head_k_dim if noun.decay.granularity == "channel" else 1)
    widths, rank = {"q": keys, "k": keys, "v": values}, noun.decay.rank
    found: Weights = ()
    for name, width in widths.items():
        found += linear(f"{name}_proj", width, hidden)
        conv = (width, noun.conv_kernel_size)
        found += (Weight(name=f"{name}_conv1d.weight", shape=conv, multiplies=True, float32=True),)
    found += linear("b_proj", noun.num_v_heads, hidden)
    found += (
        linear("f_proj", decays, hidden)
        if rank is None
        else linear("f_a_proj", rank, hidden) + linear("f_b_proj", decays, rank)
    )
    found += (
        Weight(name="A_log", shape=(noun.num_v_heads,), float32=True),
        Weight(name="dt_bias", shape=(decays,), float32=True),
    )
    found += output_gate(noun.output_gate, values, hidden)
    found += (Weight(name="o_norm.weight", shape=(noun.head_v_dim,), float32=True),)
    return found + linear("o_proj", hidden, values)


def glu(width: int, hidden: int, *, bias: bool = False) -> Weights:
    """Return the three projections of a gated unit."""
    found = linear("gate_proj", width, hidden, bias=bias) + linear("up_proj", width, hidden, bias=bias)
    return found + linear("down_proj", hidden, width, bias=bias)


def experts(noun: MoE, hidden: int) -> Weights:
    """Return router, routed experts and shared expert. The selection bias is a weight: checkpoints carry it."""
    found = linear("router", noun.num_experts, hidden)
    if noun.router.bias == "selection":
        found += (Weight(name="router.bias", shape=(noun.num_experts,), float32=True),)
    for weight in glu(noun.moe_intermediate_size, hidden):
        found += (
            replace(
                weight, name=f"experts.{{e}}.{weight.name}", copies=noun.num_experts, used=noun.num_experts_per_tok
            ),
        )
    if noun.shared:
        found += tuple(
            replace(weight, name=f"shared.{weight.name}") for weight in glu(noun.shared.intermediate_size, hidden)
        )
        found += linear("shared_gate", 1, hidden) if noun.shared.gate == "sigmoid" else ()
    return found


def hyper_connection(name: str, streams: int, hidden: int) -> Weights:
    """Return the weights of one sub-layer's stream mixing."""
    rows = (2 + streams) * streams
    return (
        Weight(name=f"{name}.fn", shape=(rows, streams * hidden), multiplies=True),
        Weight(name=f"{name}.base", shape=(rows,), float32=True),
        Weight(name=f"{name}.scale", shape=(3,), float32=True),
    )
