"""Shapes of the weights of every noun, named as the modules name them.

Enough to count parameters, bytes and multiply-adds of a model without building it.
"""

from __future__ import annotations

from dataclasses import replace

from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2, MLAttention, OutputGate
from firstlight.spec.norm import Norm
from firstlight.spec.noun import NewNoun, Nothing
from firstlight.spec.parts import OUTSIDE, Part
from firstlight.spec.weight import Weight, Weights, linear, norm


def part_weights(arch: ArchSpec, part: Part, place: int) -> Weights:
    """Return the weights of a part in one of its places, named within the layer or, outside, the model."""
    if part.kind == "embedding":
        return (Weight(name="embed.weight", shape=(arch.vocab_size, arch.hidden_size)),)
    if part.kind == "head":
        return (
            replace(linear("head", arch.vocab_size, arch.hidden_size)[0], copies=0 if arch.tie_word_embeddings else 1),
        )
    return _noun_weights(part, _sub_layers(arch, place), arch.hidden_size)


def _sub_layers(arch: ArchSpec, place: int) -> tuple[str, ...]:
    """Return which sub-layers a layer has; none outside the layers."""
    if place == OUTSIDE:
        return ()
    layer = arch.layers[place]
    present = {"mixer": layer.mixer, "ffn": layer.ffn}
    return tuple(name for name, noun in present.items() if not isinstance(noun, Nothing))


def _noun_weights(part: Part, sub_layers: tuple[str, ...], hidden: int) -> Weights:
    noun = part.noun
    residuals = tuple(f"{name}_residual" for name in sub_layers)
    if isinstance(noun, Norm):
        names = tuple(f"{name}_norm" for name in sub_layers) or ("norm",)
        return tuple(weight for name in names for weight in norm(name, hidden, noun.kind))
    if isinstance(noun, HyperConnections):
        return tuple(weight for name in residuals for weight in hyper_connection(name, noun.mult, hidden))
    if isinstance(noun, BlockAttnRes):
        return tuple(
            weight
            for name in residuals or ("residual",)
            for weight in norm(f"{name}.norm", hidden) + linear(f"{name}.proj", 1, hidden)
        )
    if isinstance(noun, NewNoun):
        found = noun.weights(hidden)
    elif isinstance(noun, MLAttention):
        found = index(noun, hidden) if part.kind == "index" else latent_attention(noun, hidden)
    elif isinstance(noun, GQAttention):
        found = attention(noun, hidden)
    elif isinstance(noun, DeltaRule):
        found = delta_rule(noun, hidden)
    elif isinstance(noun, Mamba2):
        found = state_space(noun, hidden)
    else:
        assert isinstance(noun, (GLU, MoE)), f"{type(noun).__name__} has no weights"
        found = feed_forward(noun, hidden) if isinstance(noun, GLU) else experts(noun, hidden)
    prefix = "ffn" if part.kind == "feed-forward" else "mixer.indexer" if part.kind == "index" else "mixer"
    return tuple(replace(weight, name=f"{prefix}.{weight.name}") for weight in found)


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
    found = delta_inputs(noun, hidden)
    found += (
        Weight(name="A_log", shape=(noun.num_v_heads,), float32=True),
        Weight(name="dt_bias", shape=(noun.decay_dim,), float32=True),
        Weight(name="o_norm.weight", shape=(noun.head_v_dim,), float32=True),
    )
    return found + linear("o_proj", hidden, noun.value_dim)


def delta_inputs(noun: DeltaRule, hidden: int) -> Weights:
    """Return the projections of q, k, v, output gate, write strength and decay, and the convolution over q, k, v."""
    if noun.qkv_layout == "separate":
        widths = {"q": noun.key_dim, "k": noun.key_dim, "v": noun.value_dim}
        found = tuple(weight for name, width in widths.items() for weight in linear(f"{name}_proj", width, hidden))
        found += tuple(weight for name, width in widths.items() for weight in conv(f"{name}_conv1d", width, noun))
    else:
        found = conv("conv1d", noun.conv_dim, noun)
    if noun.qkv_layout == "qkvz_grouped":
        found += linear("qkvz_proj", noun.conv_dim + noun.value_dim, hidden)
        return found + linear("ba_proj", 2 * noun.num_v_heads, hidden)
    if noun.qkv_layout == "qkv_z_b_a":
        found += linear("qkv_proj", noun.conv_dim, hidden)
    found += linear("b_proj", noun.num_v_heads, hidden) + output_gate(noun.output_gate, noun.value_dim, hidden)
    rank = noun.decay.rank
    if rank is None:
        return found + linear("f_proj", noun.decay_dim, hidden)
    return found + linear("f_a_proj", rank, hidden) + linear("f_b_proj", noun.decay_dim, rank)


def state_space(noun: Mamba2, hidden: int) -> Weights:
    """Return the weights of a state space; its convolution, decay, skip and norm stay fp32."""
    found = linear("in_proj", noun.value_dim + noun.conv_dim + noun.num_heads, hidden)
    found += conv("conv1d", noun.conv_dim, noun)
    found += (Weight(name="conv1d.bias", shape=(noun.conv_dim,), float32=True),) if noun.conv_bias else ()
    found += tuple(Weight(name=name, shape=(noun.num_heads,), float32=True) for name in ("A_log", "D", "dt_bias"))
    found += (Weight(name="o_norm.weight", shape=(noun.value_dim,), float32=True),)
    return found + linear("o_proj", hidden, noun.value_dim)


def conv(name: str, channels: int, noun: DeltaRule | Mamba2) -> Weights:
    """Return a depthwise convolution over that many channels."""
    return (Weight(name=f"{name}.weight", shape=(channels, noun.conv_kernel_size), multiplies=True, float32=True),)


def feed_forward(noun: GLU, hidden: int) -> Weights:
    """Return the three projections of a gated unit, or the two of one without a gate."""
    names = ("gate_proj", "up_proj") if noun.act.gated else ("up_proj",)
    width = noun.intermediate_size
    found = tuple(weight for name in names for weight in linear(name, width, hidden, bias=noun.bias))
    return found + linear("down_proj", hidden, width, bias=noun.bias)


def experts(noun: MoE, hidden: int) -> Weights:
    """Return router, routed experts and shared expert. The selection bias is a weight: checkpoints carry it."""
    found = linear("router", noun.num_experts, hidden)
    if noun.router.bias == "selection":
        found += (Weight(name="router.bias", shape=(noun.num_experts,), float32=True),)
    width = noun.latent.size if noun.latent else hidden
    expert = feed_forward(GLU(intermediate_size=noun.moe_intermediate_size, act=noun.act), width)
    count, used = noun.num_experts, noun.num_experts_per_tok
    found += tuple(replace(one, name=f"experts.{{e}}.{one.name}", copies=count, used=used) for one in expert)
    if noun.latent:
        found += linear("latent_down", width, hidden) + linear("latent_up", hidden, width)
        found += norm("latent_norm", width) if noun.latent.norm else ()
    unit = noun.shared_unit()
    found += tuple(replace(one, name=f"shared.{one.name}") for one in feed_forward(unit, hidden)) if unit else ()
    return found + (linear("shared_gate", 1, hidden) if noun.shared and noun.shared.gate == "sigmoid" else ())


def hyper_connection(name: str, streams: int, hidden: int) -> Weights:
    """Return the weights of one sub-layer's stream mixing."""
    rows = (2 + streams) * streams
    return (
        Weight(name=f"{name}.fn", shape=(rows, streams * hidden), multiplies=True),
        Weight(name=f"{name}.base", shape=(rows,), float32=True),
        Weight(name=f"{name}.scale", shape=(3,), float32=True),
    )
