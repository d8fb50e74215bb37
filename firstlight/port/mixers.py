"""Which mixer the tensors of a layer are, and its declaration: sizes by shape, and by the config keys that agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Literal

from firstlight.ops.registry import operator_table
from firstlight.port.observe import LayerTensors, Observation, Shape, Shapes, per_layer_keys
from firstlight.port.reference import ModuleFact
from firstlight.port.text import Call, Value
from firstlight.port.values import act_of_gate, epsilon, flag, needed, norm, reader, rope, size
from firstlight.spec.clues import CLUES
from firstlight.spec.weight import Weight

# role -> how checkpoints spell the tensor, below the block of the mixer
SPELLINGS: dict[str, str] = {
    "q": r"(q_proj|wq|query)\.weight",
    "k": r"(k_proj|wk|key)\.weight",
    "v": r"(v_proj|wv|value)\.weight",
    "o": r"(o_proj|out_proj|wo|dense)\.weight",
    "q_a": r"(q_a_proj|wq_a)\.weight",
    "q_b": r"(q_b_proj|wq_b)\.weight",
    "kv_a": r"(kv_a_proj(_with_mqa)?|wkv_a)\.weight",
    "kv_b": r"(kv_b_proj|wkv_b)\.weight",
    "q_a_norm": r"(q_a_(layer)?norm|q_norm)\.weight",
    "kv_a_norm": r"(kv_a_(layer)?norm|kv_norm)\.weight",
    "q_norm": r"q_(layer)?norm\.weight",
    "gate": r"(g_proj|gate_proj)\.weight",
    "gate_a": r"g_a_proj\.weight",
    "decay_a": r"f_a_proj\.weight",
    "conv": r"(q_)?conv1d\.weight",
    "qkvz": r"in_proj_qkvz\.weight",
    "qkv": r"in_proj_qkv\.weight",
    "o_norm": r"(o_norm|norm)\.weight",
    "in": r"in_proj\.weight",
    "index_q": r"indexer\.(wq_b|q_proj)\.weight",
    "index_k": r"indexer\.(wk|k_proj)\.weight",
    "index_weights": r"indexer\.weights_proj\.weight",
    "index_pool": r"indexer\.(\w+_ape|position_bias)",
}


HEADS = ("linear_num_heads", "linear_attn_config.num_heads")
HEAD_DIM = ("linear_head_dim", "linear_attn_config.head_dim")
CONV_WIDTH = ("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size")
LOWER_BOUND = ("linear_lower_bound", "linear_attn_config.gate_lower_bound")
STATE_GROUPS = ("n_groups", "mamba_n_groups")

# parameters of a recurrence, whose rounding a long sequence multiplies
KEPT_IN_FLOAT32 = ("A_log", "D", "dt_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A mixer or feed-forward that the vocabulary lacks: its tensors as they are.

    operator: a name for its arithmetic, new as well. meaning: what the clues take it for.
    """

    part: Literal["mixer", "feed_forward"]
    tensors: tuple[Weight, ...]
    operator: str
    meaning: str
    block: str


def role(tensors: Shapes, name: str) -> Shape | None:
    """Return the shape of the tensor that plays a role, None if there is none."""
    return next((shape for tensor, shape in tensors.items() if re.fullmatch(SPELLINGS[name], tensor)), None)


def spelt(tensors: Shapes, name: str) -> str:
    """Return the module that plays a role, as the checkpoint spells it."""
    return next(t for t in tensors if re.fullmatch(SPELLINGS[name], t)).removesuffix(".weight")


def draft_mixer(seen: Observation, layer: int) -> Call | Skeleton | None:
    """Return the declaration of a layer's mixer, None if it has none."""
    found = seen.layers[layer]
    here = {name: role(found.mixer, name) for name in SPELLINGS}
    if not found.mixer:
        return None
    if here["kv_a"] and here["kv_b"] and here["o"]:
        return latent_attention(seen, layer, found.mixer)
    grouped, recurrent = here["q"] and here["k"] and here["v"], "A_log" in found.mixer and "dt_bias" in found.mixer
    if recurrent and here["conv"] and here["o_norm"] and (grouped or here["qkvz"] or here["qkv"]):
        return delta_rule(seen, layer, found.mixer)
    if recurrent and here["o_norm"] and is_state_space(found.mixer):
        return state_space(seen, layer, found.mixer)
    if grouped and here["o"] and not recurrent and not here["conv"]:
        return grouped_attention(seen, layer, found.mixer)
    return skeleton(found.mixer_block, found.mixer, "mixer")


def skeleton(block: str, tensors: Shapes, part: Literal["mixer", "feed_forward"]) -> Skeleton:
    """Return a noun of the tensors as they are, dimensions of size 1 in the middle left out."""
    names = [f"layers.{{n}}.{block}.{name}" for name in tensors]
    known = [clue for clue in CLUES if clue.tensors and any(re.search(clue.tensors, name) for name in names)]
    lacking = [(clue, name) for clue in known for name in clue.operators if name not in operator_table()]
    meaning, operator = (lacking[0][0].meaning, lacking[0][1]) if lacking else ("a new one", f"new_{part}")
    weights = tuple(
        Weight(
            name=name,
            shape=(shape[0], *(n for n in shape[1:] if n != 1)),
            multiplies=len(shape) == 2,
            float32=name in KEPT_IN_FLOAT32,
        )
        for name, shape in tensors.items()
        if "{e}" not in name
    )
    return Skeleton(part=part, tensors=weights, operator=operator, meaning=meaning, block=block)


def grouped_attention(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return a GQAttention. A query projection of twice the width of the output emits a gate."""
    block = seen.layers[layer].mixer_block
    q, k, o, qk_norm = (role(t, name) for name in ("q", "k", "o", "q_norm"))
    assert q and k and o, "draft_mixer looked"
    heads = int(seen.value("num_attention_heads") or 0)
    dim = qk_norm[0] if qk_norm and qk_norm[0] < o[1] else o[1] // heads if heads else int(seen.value("head_dim") or 64)
    heads = o[1] // dim
    fact = seen.reference.find(layer, block)
    call = Call("GQAttention")
    call.set(
        "num_attention_heads", size(seen, heads, "num_attention_heads", shape=f"{block}.o_proj has {o[1]} columns")
    )
    call.set("num_key_value_heads", size(seen, k[0] // dim, "num_key_value_heads", shape=f"k_proj has {k[0]} rows"))
    head_dim = size(seen, dim, "head_dim", shape=f"{block}.o_proj has {o[1]} columns for {heads} heads")
    call.set("head_dim", head_dim).set("scaling", f"{head_dim.code} ** -0.5")
    call.set("rope", rope(seen, str(head_dim.code), fact, usual="half"))
    if qk_norm:
        call.set("qk_norm", norm(seen, layer, f"{block}.{spelt(t, 'q_norm')}"))
    if q[0] == 2 * o[1] or role(t, "gate"):
        gate = Call("OutputGate").set("act", act_of_gate(seen, fact, usual="sigmoid"))
        if q[0] == 2 * o[1]:
            gate.set("source", Value('"q_proj"', guess=f"{spelt(t, 'q')} has twice the rows that o_proj has columns"))
        call.set("output_gate", gate)
    if "sinks" in t:
        call.set("sinks", True)
    kinds = [words[layer] for words in per_layer_keys(seen).values() if any("sliding" in word for word in words)]
    if seen.value("sliding_window") and seen.value("use_sliding_window") is not False:
        if not kinds:
            call.set("sliding_window", Value('cfg.positive("sliding_window")', guess="no key says that it is off"))
        elif any("sliding" in word for word in kinds):
            call.set("sliding_window", 'cfg.positive("sliding_window")')
    biased, out_biased = (f"{spelt(t, name)}.bias" in t for name in ("q", "o"))
    bias = flag(seen, biased, "attention_bias", "qkv_bias", tensor=f"{block}.{spelt(t, 'q')}.bias")
    out_bias = flag(seen, out_biased, "attention_bias", tensor=f"{block}.{spelt(t, 'o')}.bias")
    return call.unless("False", "bias", bias).unless("False", "out_bias", out_bias)


def latent_attention(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return an MLAttention, with its indexer if any layer has one."""
    block = seen.layers[layer].mixer_block
    kv_a, kv_b, o = (role(t, name) or (0, 0) for name in ("kv_a", "kv_b", "o"))
    q = role(t, "q_b") or role(t, "q") or (0, 0)
    heads = int(seen.value("num_attention_heads") or 1)
    value_dim, query_dim = o[1] // heads, q[0] // heads
    nope = kv_b[0] // heads - value_dim
    call = Call("MLAttention").set("num_attention_heads", needed(seen, "num_attention_heads", what="heads"))
    if q_a := role(t, "q_a"):
        call.set("q_lora_rank", size(seen, q_a[0], "q_lora_rank", shape=f"{spelt(t, 'q_a')} has {q_a[0]} rows"))
    call.set("kv_lora_rank", size(seen, kv_b[1], "kv_lora_rank", shape=f"kv_b has {kv_b[1]} columns"))
    call.set("qk_nope_head_dim", size(seen, nope, "qk_nope_head_dim", shape=f"{nope} of {kv_b[0]} rows of kv_b a head"))
    rotated = kv_a[0] - kv_b[1]
    shape = f"kv_a has {rotated} rows more than the latent"
    rope_dim = size(seen, rotated, "qk_rope_head_dim", shape=shape) if rotated else Value("0")
    call.set("qk_rope_head_dim", rope_dim)
    call.set("v_head_dim", size(seen, value_dim, "v_head_dim", shape=f"o_proj has {o[1]} columns for {heads} heads"))
    fact = seen.reference.find(layer, block)
    if rotated:
        call.set("rope", rope(seen, str(rope_dim.code), fact, usual="interleave", switch="rope_interleave"))
    latent_norm = f"{block}.{spelt(t, 'kv_a_norm')}"
    call.set("latent_norm_eps", epsilon(seen, layer, latent_norm, usual="1e-06"))
    call.set("scaling", softmax_scale(seen, query_dim, call.args.get("rope")))
    if role(t, "gate"):
        gate = Call("OutputGate").set("act", act_of_gate(seen, fact, usual="sigmoid"))
        call.set("output_gate", gate)
    owner = layer if role(t, "index_q") else next((i for i in reversed(range(layer)) if indexed(seen.layers[i])), None)
    if owner is not None:
        call.set("indexer", indexer(seen, owner, rope_dim, shared=owner != layer))
    biased = any(name.endswith(".bias") and not name.startswith("indexer") for name in t)
    return call.unless("False", "bias", flag(seen, biased, "attention_bias", tensor=f"bias in {block}"))


def softmax_scale(seen: Observation, query_dim: int, positions: Value | None) -> Value:
    """Return the code of 1/sqrt(width), times what YaRN asks for where the config does."""
    width = size(seen, query_dim, "qk_head_dim", shape="rows of the query projection a head").code
    tables = [seen.value(key) for key in ("rope_parameters", "rope_scaling")]
    scaled = any(isinstance(table, dict) and "mscale_all_dim" in table for table in tables)
    if positions is not None and scaled:
        return Value(f"softmax_scale({width}, {positions.code})")
    return Value(f"{width} ** -0.5")


def indexed(found: LayerTensors) -> bool:
    """Return whether a layer owns an index branch."""
    return role(found.mixer, "index_q") is not None


def indexer(seen: Observation, layer: int, rope_dim: Value, *, shared: bool) -> Call:
    """Return the Indexer of the layer that owns it. shared: for a layer that reuses its selection."""
    t, block = seen.layers[layer].mixer, f"{seen.layers[layer].mixer_block}.indexer"
    q, k, pool = (role(t, name) for name in ("index_q", "index_k", "index_pool"))
    assert q and k, "the layer owns an index"
    call = Call("Indexer")
    shape = f"{block}: {q[0]} rows of query, {k[0]} of key"
    call.set("num_heads", size(seen, q[0] // k[0], "index_n_heads", shape=shape))
    call.set("head_dim", size(seen, k[0], "index_head_dim", shape=f"the key of {block} has {k[0]} rows"))
    call.set("topk", needed(seen, "index_topk", what="selected tokens"))
    if rope_dim.code != "0":
        fact = seen.reference.find(layer, block)
        rotated = rope(seen, str(rope_dim.code), fact, usual="interleave", switch="indexer_rope_interleave")
        call.set("rope", rotated)
    key_norm = norm(seen, layer, f"{block}.k_norm", biased="indexer.k_norm.bias" in t, usual="1e-06")
    if key_norm.args["eps"].code != "1e-06" or "kind" not in key_norm.args:
        call.set("key_norm", key_norm)
    if pool:
        shape = f"a position bias of {pool[0]} rows"
        made = Call("KeyPool").set("size", size(seen, pool[0], "index_kpool", shape=shape))
        if seen.value("index_kpool_always_select_tail") is not None:
            made.set("always_tail", 'cfg.get("index_kpool_always_select_tail", True)')
        call.set("pool", made)
    if shared:
        listed = seen.value("indexer_types") is not None or seen.value("index_topk_pattern") is not None
        guess = "" if listed else "no indexer tensors here, an earlier layer has them"
        call.set("mode", Value('"shared"', guess=guess))
    return call


def delta_rule(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return a DeltaRule in the layout of its projections."""
    block = seen.layers[layer].mixer_block
    heads, decays = prod(t["A_log"]), prod(t["dt_bias"])
    value_head = (role(t, "o_norm") or (1,))[0]
    conv, q, k = (role(t, name) for name in ("conv", "q", "k"))
    assert conv, "draft_mixer looked"
    keys = k[0] if k else (conv[0] - heads * value_head) // 2
    per_channel = decays != heads
    named = int(seen.value("linear_num_key_heads") or heads)
    key_heads = heads if per_channel or keys % named else named
    call, shape = Call("DeltaRule"), f"{heads} in A_log"
    call.set("num_k_heads", size(seen, key_heads, "linear_num_key_heads", *HEADS, shape=shape))
    call.set("num_v_heads", size(seen, heads, "linear_num_value_heads", *HEADS, shape=shape))
    shape = f"{keys} key channels for {key_heads} heads"
    call.set("head_k_dim", size(seen, keys // key_heads, "linear_key_head_dim", *HEAD_DIM, shape=shape))
    shape = f"the output norm has {value_head} channels"
    call.set("head_v_dim", size(seen, value_head, "linear_value_head_dim", *HEAD_DIM, shape=shape))
    call.set("conv_kernel_size", size(seen, conv[-1], *CONV_WIDTH, shape=f"conv1d is {conv[-1]} wide"))
    call.set("decay", decay(seen, layer, t, per_channel))
    usual = "sigmoid" if per_channel else "silu"
    norm_path = f"{block}.{spelt(t, 'o_norm')}"
    applied = act_of_gate(seen, seen.reference.find(layer, norm_path), usual=usual)
    gate = Call("OutputGate").set("act", applied)
    if gate_a := role(t, "gate_a"):
        gate.set("rank", size(seen, gate_a[0], *HEAD_DIM, shape=f"g_a_proj has {gate_a[0]} rows"))
    call.set("output_gate", gate).set("norm_eps", epsilon(seen, layer, norm_path))
    if not q:
        layout = "qkvz_grouped" if role(t, "qkvz") else "qkv_z_b_a"
        call.set("qkv_layout", f'"{layout}"')
    return call


def decay(seen: Observation, layer: int, t: Shapes, per_channel: bool) -> Call:
    """Return the Decay: bounded where a config key gives the bound."""
    call = Call("Decay").set("granularity", '"channel"' if per_channel else '"head"')
    key = seen.key(*LOWER_BOUND)
    usual = seen.usual(LOWER_BOUND[0])
    texts = [fact for fact in seen.reference.inside(layer) if fact.says(r"softplus|lower_bound")]
    if key:
        call.set("form", Value('"bounded"', guess=f"{key} = {seen.value(key)} bounds the log decay"))
        call.set("lower_bound", reader(key, "require", "float"))
    elif isinstance(usual, float) and LOWER_BOUND[0] not in seen.raw:
        told = f"{seen.says} takes {LOWER_BOUND[0]} = {usual}, which config.json lacks"
        call.set("form", Value('"bounded"', guess=told)).set("lower_bound", repr(usual))
    else:
        told = f"{seen.says} {texts[0].cls} computes softplus" if texts else "no key gives a lower bound"
        call.set("form", Value('"softplus"', guess=told))
    if rank := role(t, "decay_a"):
        call.set("rank", size(seen, rank[0], *HEAD_DIM, shape=f"f_a_proj has {rank[0]} rows"))
    return call


def is_state_space(t: Shapes) -> bool:
    """Return whether the input projection makes z, the channels of the convolution and a step per head."""
    fused, conv, o = (role(t, name) for name in ("in", "conv", "o"))
    if not (fused and conv and o and "D" in t):
        return False
    heads, width = prod(t["A_log"]), o[1]
    return fused[0] == width + conv[0] + heads and width % heads == 0 and conv[0] > width


def groups_of(seen: Observation, heads: int, shared: int) -> int:
    """Return the groups of B and C: as a config key says, or by the width of a state; one where neither fits."""
    state = seen.value("ssm_state_size") or seen.value("mamba_d_state")
    told = [*map(seen.value, STATE_GROUPS), shared // state if isinstance(state, int) else None]
    return next((n for n in told if isinstance(n, int) and n > 0 and heads % n == shared % n == 0), 1)


def state_space(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return a Mamba2."""
    block, conv, o = seen.layers[layer].mixer_block, role(t, "conv"), role(t, "o")
    assert conv and o, "draft_mixer looked"
    heads, width = prod(t["A_log"]), o[1]
    shared = (conv[0] - width) // 2
    groups = groups_of(seen, heads, shared)
    call = Call("Mamba2").set(
        "num_heads", size(seen, heads, "mamba_num_heads", "mamba_n_heads", shape=f"{heads} in A_log")
    )
    shape = f"{spelt(t, 'o')} has {width} columns for {heads} heads"
    call.set("head_dim", size(seen, width // heads, "mamba_head_dim", "mamba_d_head", shape=shape))
    shape = f"{conv[0] - width} channels of the convolution are B and C, for {groups} groups"
    call.set("state_size", size(seen, shared // groups, "ssm_state_size", "mamba_d_state", shape=shape))
    call.set("num_groups", size(seen, groups, *STATE_GROUPS, shape=shape))
    shape = f"conv1d is {conv[-1]} wide"
    call.set("conv_kernel_size", size(seen, conv[-1], "conv_kernel", "mamba_d_conv", shape=shape))
    biased = "conv1d.bias" in t
    call.set("conv_bias", flag(seen, biased, "use_conv_bias", "mamba_conv_bias", tensor=f"{block}.conv1d.bias"))
    call.set("norm_eps", epsilon(seen, layer, f"{block}.{spelt(t, 'o_norm')}"))
    return call.unless("0.0", "dt_min", least_step(seen, seen.reference.find(layer, block)))


def least_step(seen: Observation, fact: ModuleFact | None) -> Value:
    """Return the floor of the time step: `time_step_min`, unless the reference only starts its training there."""
    read, usual = seen.value("time_step_min"), seen.usual("time_step_min")
    if (read is None and usual is None) or (fact and not fact.says(r"time_step_limit = \(config\.time_step_min")):
        return Value("0.0")
    told = f"{seen.says} {fact.cls} clamps to it" if fact else "a floor of the step, unless it only starts the training"
    return Value('cfg.get("time_step_min", 0.0)' if read is not None else repr(usual), guess=told)
