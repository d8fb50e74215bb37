"""Names and shapes of every parameter, in terms of the fields of its noun, and its usual spelling in a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections, Layer, PreNorm, Residual
from firstlight.spec.feedforward import GLU, Act, Latent, MoE, Router, SharedExpert
from firstlight.spec.mixers import (
    Decay,
    DeltaRule,
    GQAttention,
    Indexer,
    KeyPool,
    Mamba2,
    Mixer,
    MLAttention,
    OutputGate,
)
from firstlight.spec.names import DECODER
from firstlight.spec.norm import Norm
from firstlight.spec.parts import Kind, parts
from firstlight.spec.shapes import part_weights
from firstlight.spec.weight import Weight
from pages.markdown import code, escaped, table

PLACE = 3


class Named(int):
    """A number that remembers how it was made."""

    text: str

    def __new__(cls, value: int, text: str) -> Named:
        """Return the number with its text."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __mul__(self, other: int) -> Named:
        """Return the product."""
        return _joined(self, other, "*", operator.mul)

    def __rmul__(self, other: int) -> Named:
        """Return the product."""
        return _joined(other, self, "*", operator.mul)

    def __add__(self, other: int) -> Named:
        """Return the sum."""
        return _joined(self, other, "+", operator.add)

    def __radd__(self, other: int) -> Named:
        """Return the sum."""
        return _joined(other, self, "+", operator.add)


def _joined(left: int, right: int, sign: str, compute: Callable[[int, int], int]) -> Named:
    texts = [getattr(side, "text", str(side)) for side in (left, right)]
    if sign == "*" and "1" in texts:
        return Named(int(left) * int(right), next(text for text in texts if text != "1"))
    if sign == "*":
        texts = [f"({text})" if " + " in text else text for text in texts]
    return Named(compute(int(left), int(right)), f" {sign} ".join(texts))


def named(cls: type, **given: Any) -> Any:
    """Return a noun whose whole numbers remember the fields they stand in."""
    sized = {
        key: Named(value, key) if isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in given.items()
    }
    return cls(**sized)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A noun in its plainest form, and what else it may have. kind: the part of a model that it is."""

    title: str
    noun: Any
    kind: Kind
    variants: Mapping[str, Any]

    def weights(self, noun: Any) -> dict[str, Weight]:
        """Return the weights of the noun or of a variant by name, named within a layer."""
        norm = Norm(eps=1e-6)
        layer = Layer(norm=norm, ffn=noun) if self.kind == "feed-forward" else Layer(norm=norm, mixer=noun)
        arch = architecture((layer,), norm, PreNorm())
        [part] = [part for part in parts(arch) if part.kind == self.kind]
        return {weight.name: weight for weight in part_weights(arch, part, 0)}


def architecture(layers: tuple[Layer, ...], norm: Norm, residual: Residual) -> ArchSpec:
    """Return a model of these layers."""
    return ArchSpec(
        model_type="any",
        vocab_size=Named(256, "vocab_size"),
        hidden_size=HIDDEN,
        max_position_embeddings=128,
        layers=layers,
        norm=norm,
        residual=residual,
    )


HIDDEN = Named(64, "hidden_size")
HIDDEN_GATE = OutputGate(act="sigmoid")
LOW_RANK = OutputGate(act="sigmoid", rank=Named(16, "rank"))


def examples() -> list[Example]:
    """Return an example of every noun of the vocabulary with weights of its own."""
    gqa = named(GQAttention, num_attention_heads=4, num_key_value_heads=2, head_dim=16, scaling=0.25)
    mla = named(
        MLAttention,
        num_attention_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        latent_norm_eps=1e-6,
        scaling=0.2,
        q_lora_rank=24,
    )
    index = named(Indexer, num_heads=2, head_dim=8, topk=32)
    indexed = replace(mla, indexer=index)
    per_channel, per_head = Decay(granularity="channel", form="softplus"), Decay(granularity="head", form="softplus")
    delta = named(
        DeltaRule,
        num_k_heads=2,
        num_v_heads=4,
        head_k_dim=16,
        head_v_dim=8,
        conv_kernel_size=4,
        decay=per_channel,
        output_gate=HIDDEN_GATE,
        norm_eps=1e-6,
    )
    space = named(
        Mamba2, num_heads=4, head_dim=16, state_size=8, num_groups=2, conv_kernel_size=4, norm_eps=1e-6, conv_bias=False
    )
    glu = named(GLU, intermediate_size=96)
    moe = named(MoE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, router=Router(score="softmax"))
    shared = named(SharedExpert, intermediate_size=48)
    relu2 = Act(kind="relu2")
    return [
        Example(
            title="GQAttention",
            noun=gqa,
            kind="mixer",
            variants={
                "bias": replace(gqa, bias=True),
                "out_bias": replace(gqa, out_bias=True),
                "qk_norm": replace(gqa, qk_norm=Norm(eps=1e-6)),
                "qk_norm of kind layer": replace(gqa, qk_norm=Norm(eps=1e-6, kind="layer")),
                "sinks": replace(gqa, sinks=True),
                "output_gate, source hidden": replace(gqa, output_gate=HIDDEN_GATE),
                "output_gate with rank": replace(gqa, output_gate=LOW_RANK),
                "output_gate, source q_proj": replace(gqa, output_gate=OutputGate(act="sigmoid", source="q_proj")),
            },
        ),
        Example(
            title="MLAttention",
            noun=mla,
            kind="mixer",
            variants={
                "q_lora_rank None": replace(mla, q_lora_rank=None),
                "bias": replace(mla, bias=True),
                "output_gate": replace(mla, output_gate=HIDDEN_GATE),
                "output_gate with rank": replace(mla, output_gate=LOW_RANK),
            },
        ),
        Example(
            title="Indexer (of an MLAttention, mode full)",
            noun=indexed,
            kind="index",
            variants={
                "q_lora_rank None": replace(indexed, q_lora_rank=None),
                "pool": replace(indexed, indexer=replace(index, pool=KeyPool(size=Named(4, "size")))),
            },
        ),
        Example(
            title="DeltaRule",
            noun=delta,
            kind="mixer",
            variants={
                "decay per head": replace(delta, decay=per_head),
                "decay with rank": replace(delta, decay=replace(per_channel, rank=Named(16, "rank"))),
                "output_gate with rank": replace(delta, output_gate=LOW_RANK),
                "qkv_layout qkv_z_b_a": replace(delta, qkv_layout="qkv_z_b_a"),
                "qkv_layout qkvz_grouped": replace(delta, qkv_layout="qkvz_grouped", decay=per_head),
            },
        ),
        Example(title="Mamba2", noun=space, kind="mixer", variants={"conv_bias": replace(space, conv_bias=True)}),
        Example(
            title="GLU",
            noun=glu,
            kind="feed-forward",
            variants={"bias": replace(glu, bias=True), "act relu2": replace(glu, act=relu2)},
        ),
        Example(
            title="MoE",
            noun=moe,
            kind="feed-forward",
            variants={
                "router.bias selection": replace(moe, router=Router(score="sigmoid", bias="selection")),
                "act relu2": replace(moe, act=relu2),
                "shared": replace(moe, shared=shared),
                "shared.gate sigmoid": replace(moe, shared=replace(shared, gate="sigmoid")),
                "latent": replace(moe, latent=Latent(size=Named(16, "size"))),
                "latent.norm": replace(moe, latent=Latent(size=Named(16, "size"), norm=True)),
            },
        ),
    ]


def rows(example: Example) -> list[tuple[str, ...]]:
    """Return a row per weight: name, when it is there, shape, an example, usual spelling."""
    plain = example.weights(example.noun)
    found: dict[tuple[str, str], tuple[Weight, list[str]]] = {
        (weight.name, shape(weight)): (weight, []) for weight in plain.values()
    }
    gone: dict[str, list[str]] = {}
    for label, noun in example.variants.items():
        weights = example.weights(noun)
        for name in plain.keys() - weights.keys():
            gone.setdefault(name, []).append(label)
        for weight in weights.values():
            if weight.name not in plain or shape(weight) != shape(plain[weight.name]):
                found.setdefault((weight.name, shape(weight)), (weight, []))[1].append(label)
    made, order = [], {name: place for place, (name, _) in reversed(list(enumerate(found)))}
    for (name, text), (weight, labels) in sorted(found.items(), key=lambda item: order[item[0][0]]):
        when = " or ".join(labels) if labels else f"not with {', '.join(gone[name])}" if name in gone else ""
        number = f"[{', '.join(str(int(size)) for size in weight.shape)}]"
        made.append((code(name), when, escaped(text), escaped(number), spelling(f"layers.{PLACE}.{name}")))
    return made


def shape(weight: Weight) -> str:
    """Return the shape in terms of the noun's fields, fp32 if it is kept so."""
    sizes = ", ".join(getattr(size, "text", str(size)) for size in weight.shape)
    return f"[{sizes}]" + (" fp32" if weight.float32 else "")


def spelling(name: str) -> str:
    """Return the checkpoint's name of a parameter by the rules that most decoders share."""
    found = DECODER.candidates(name.replace("{e}", "5"))
    return ", ".join(code(f"{one.name}{_part(one.source)}") for one in found) or "none"


def _part(source: Any) -> str:
    part = [f"[{PLACE + 2}]"] if source.expert else []
    part += [f" chunk {source.chunk[0]} of {source.chunk[1]}"] if source.chunk else []
    return "".join(part)


def outside() -> list[tuple[str, ...]]:
    """Return rows of what lies outside the nouns: embedding, head, norms, residuals."""
    glu = named(GLU, intermediate_size=96)
    mixer: Mixer = examples()[0].noun
    found: dict[str, tuple[str, ...]] = {}
    residuals: dict[str, Residual] = {
        "": PreNorm(),
        "HyperConnections": HyperConnections(mult=Named(4, "mult"), sinkhorn_iters=20, eps=1e-6, norm_eps=1e-5),
        "BlockAttnRes": BlockAttnRes(block_size=4),
    }
    for (when, residual), kind in [(pair, kind) for kind in ("rms", "layer") for pair in residuals.items()]:
        norm = Norm(eps=1e-6, kind=kind)
        arch = architecture((Layer(mixer=mixer, ffn=glu, norm=norm),) * (PLACE + 1), norm, residual)
        for part in parts(arch):
            if part.kind in ("mixer", "feed-forward", "index"):
                continue
            place = part.places[-1] if part.places[-1] < 0 or part.kind in ("norm", "residual") else 0
            for here in {place, PLACE} if PLACE in part.places else {place}:
                for weight in part_weights(arch, part, here):
                    ours = weight.name if here < 0 else f"layers.{here}.{weight.name}"
                    there = when or ("norm of kind layer" if kind == "layer" else "")
                    number = f"[{', '.join(str(int(size)) for size in weight.shape)}]"
                    general = ours.replace(f"layers.{PLACE}.", "layers.{i}.")
                    row = (code(general), there, escaped(shape(weight)), escaped(number), spelling(ours))
                    found.setdefault(general, row)
    return [
        found[name] for name in sorted(found, key=lambda name: (name.startswith("layers"), "residual" in name, name))
    ]


HEADER = ("our name", "when", "shape", "example", "as most decoders spell it")


def parameter_tables() -> str:
    """Return the tables of all parameters."""
    texts = ["### Outside the layers, norms and residuals", table(HEADER, outside())]
    for example in examples():
        texts += [f"### {example.title}", table(HEADER, rows(example))]
    return "\n\n".join(texts)
