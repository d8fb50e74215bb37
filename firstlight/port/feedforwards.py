"""Which feed-forward the tensors of a layer are, and its declaration."""

from __future__ import annotations

import re

from firstlight.port.mixers import Skeleton, skeleton
from firstlight.port.observe import Observation, Shape, Shapes
from firstlight.port.reference import ModuleFact
from firstlight.port.text import Call, Value
from firstlight.port.values import act, either, flag, needed, size

SPELLINGS: dict[str, str] = {
    "gate": r"(gate_proj|w1)\.weight",
    "up": r"(up_proj|w3|fc1)\.weight",
    "down": r"(down_proj|w2|fc2)\.weight",
    "expert_gate": r"experts\.\{e\}\.(gate_proj|w1)\.weight",
    "expert_up": r"experts\.\{e\}\.(up_proj|w3)\.weight",
    "expert_down": r"experts\.\{e\}\.(down_proj|w2)\.weight",
    "fused_gate_up": r"experts\.gate_up_proj",
    "fused_down": r"experts\.down_proj",
    "router": r"(gate|router)\.weight",
    "selection_bias": r"((gate|router)\.)?e_score_correction_bias|gate\.bias|expert_bias",
    "shared_up": r"shared_experts?\.(up_proj|w3)\.weight",
    "shared_gate_proj": r"shared_experts?\.(gate_proj|w1)\.weight",
    "shared_gate": r"shared_expert_gate\.weight",
    "latent_down": r"(fc1_latent_proj|routed_expert_down_proj)\.weight",
    "latent_norm": r"routed_expert_norm\.weight",
}


def role(tensors: Shapes, name: str) -> Shape | None:
    """Return the shape of the tensor that plays a role, None if there is none."""
    return next((shape for tensor, shape in tensors.items() if re.fullmatch(SPELLINGS[name], tensor)), None)


def draft_ffn(seen: Observation, layer: int) -> Call | Skeleton | None:
    """Return the declaration of a layer's feed-forward, None if it has none."""
    found = seen.layers[layer]
    t = found.ffn
    if not t:
        return None
    if role(t, "router") and (role(t, "expert_up") or role(t, "fused_gate_up")):
        return mixture(seen, layer, t)
    if role(t, "up") and role(t, "down"):
        return unit(seen, t, found.ffn_block)
    return skeleton(found.ffn_block, t, "feed_forward")


def unit(seen: Observation, t: Shapes, block: str) -> Call:
    """Return a GLU."""
    up = role(t, "up")
    assert up, "draft_ffn looked"
    biased = any(name.endswith(".bias") for name in t)
    width = size(seen, up[0], "intermediate_size", shape=f"{up[0]} rows of {block}.up_proj")
    call = Call("GLU").set("intermediate_size", width)
    activation = act(seen, gated=role(t, "gate") is not None)
    if activation:
        call.set("act", activation)
    return call.unless("False", "bias", flag(seen, biased, "mlp_bias", tensor=f"bias in {block}"))


def mixture(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return a MoE."""
    block = seen.layers[layer].ffn_block
    fused, up, gate = role(t, "fused_gate_up"), role(t, "expert_up"), role(t, "expert_gate")
    routed = role(t, "router")
    assert routed, "draft_ffn looked"
    # stored [E, 2I, H] or transposed
    width = up[0] if up else (fused[1] if fused[2] == seen.hidden else fused[2]) // 2 if fused else 0
    count = seen.num_experts if up else fused[0] if fused else 0
    call = Call("MoE").set("num_experts", size(seen, count, "num_experts", shape=f"{count} experts in {block}"))
    call.set("num_experts_per_tok", needed(seen, "num_experts_per_tok", "moe_topk", "top_k", what="experts of a token"))
    call.set("moe_intermediate_size", size(seen, width, "moe_intermediate_size", shape=f"an expert has {width} rows"))
    call.set("router", router(seen, layer, t))
    activation = act(seen, gated=fused is not None or gate is not None)
    if activation:
        call.set("act", activation)
    if shared := role(t, "shared_up"):
        call.set("shared", shared_expert(seen, layer, t, shared[0], width))
    if latent := role(t, "latent_down"):
        keys = ("moe_latent_size", "routed_expert_hidden_size")
        inner = Call("Latent").set("size", size(seen, latent[0], *keys, shape=f"{latent[0]} rows before the experts"))
        call.set("latent", inner.set("norm", True) if role(t, "latent_norm") else inner)
    return call


def shared_expert(seen: Observation, layer: int, t: Shapes, rows: int, width: int) -> Call:
    """Return the SharedExpert: of its own width, or of several times that of a routed one."""
    own = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    count = seen.value("n_shared_experts")
    if not any(seen.value(key) == rows for key in own) and isinstance(count, int) and count * width == rows:
        value = Value('cfg.positive("moe_intermediate_size") * cfg.positive("n_shared_experts")')
    else:
        value = size(seen, rows, *own, shape=f"the shared expert has {rows} rows")
    call = Call("SharedExpert").set("intermediate_size", value)
    if role(t, "shared_gate"):
        call.set("gate", '"sigmoid"')
    return call


def router(seen: Observation, layer: int, t: Shapes) -> Call:
    """Return the Router; its score by config key, else by the reference's text, else by its bias."""
    biased = role(t, "selection_bias") is not None
    fact = text_of_router(seen, layer)
    call = Call("Router")
    named = seen.value("scoring_func")
    if named in ("sigmoid", "softmax"):
        call.set("score", Value(f'"{named}"', guess=f"scoring_func = {named}"))
    elif named:
        call.set("score", Value('"sigmoid"', todo=f"scoring_func = {named}: no Router scores so"))
    elif fact:
        told = "sigmoid" if fact.says("sigmoid") else "softmax"
        call.set("score", Value(f'"{told}"', guess=f"{seen.says} {fact.cls} calls {told}"))
    else:
        told = "sigmoid" if biased else "softmax"
        evidence = "a bias on the choice usually goes" if biased else "a router without bias usually goes"
        call.set("score", Value(f'"{told}"', guess=f"{evidence} with {told}"))
    if biased:
        call.set("bias", '"selection"')
    if (seen.value("n_group") or seen.usual("n_group") or 1) > 1:
        call.set("num_groups", needed(seen, "n_group", what="groups of experts"))
        call.set("topk_groups", needed(seen, "topk_group", what="groups that compete"))
    renorm = "transformers divides by the sum" if fact and fact.says(r"/=?.*sum\(|denominator") else "usual"
    call.set("renorm", either(seen, "norm_topk_prob", True, renorm))
    if seen.value("routed_scaling_factor") is not None or seen.usual("routed_scaling_factor") is not None:
        call.set("scale", either(seen, "routed_scaling_factor", 1.0, "none"))
    return call


def text_of_router(seen: Observation, layer: int) -> ModuleFact | None:
    """Return the module of the reference that scores experts."""
    routers = (fact for fact in seen.reference.inside(layer) if "outer" in fact.cls)
    return next((fact for fact in routers if fact.says("sigmoid", r"softmax\(")), None)
