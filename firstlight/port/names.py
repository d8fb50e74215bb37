"""How the checkpoint spells the parameters of a draft: one rule per block, and one per tensor that differs in it.

A parameter of ours and a tensor are one if they lie in the same layer, have the same shape and the same name after
the usual spellings are translated; what is left over is paired where only one tensor of the block has the shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from firstlight.layers.parameter import Target
from firstlight.port.observe import LayerTensors, Observation
from firstlight.spec.names import DECODER, NameMap, Rule, Source

# spelling in a checkpoint, below the block -> ours; applied in order, each at most once
MIXER_WORDS = (
    (r"(^|\.)(w?)(q|k|v|kv|o)_layernorm\b", r"\1\3_norm"),
    (r"_a_layernorm\b", "_a_norm"),
    (r"kv_a_proj_with_mqa\b|wkv_a\b", "kv_a_proj"),
    (r"\bwkv_b\b", "kv_b_proj"),
    (r"\bindexer\.wq_b\b", "indexer.q_proj"),
    (r"\bindexer\.wk\b", "indexer.k_proj"),
    (r"\bindexer\.\w+_compress_gate$", "indexer.gate_proj.weight"),
    (r"\bindexer\.\w+_ape$", "indexer.position_bias"),
    (r"^wq_a\b", "q_a_proj"),
    (r"^wq_b\b", "q_b_proj"),
    (r"^w([qkvo])\b", r"\1_proj"),
    (r"^(?:in_proj_|c_)?(qkvz|ba|qkv)\b(?!_)", r"\1_proj"),
    (r"^in_proj_z\b", "g_proj"),
    (r"^in_proj_b\b", "b_proj"),
    (r"^in_proj_a\b", "f_proj"),
    (r"^(out_proj|dense)\b", "o_proj"),
    (r"^norm\b", "o_norm"),
    (r"^query\b", "q_proj"),
    (r"^key\b", "k_proj"),
    (r"^value\b", "v_proj"),
)
FFN_WORDS = (
    (r"^((gate|router)\.)?e_score_correction_bias$|^expert_bias$", "router.bias"),
    (r"^(gate|router)\.", "router."),
    (r"^shared_expert_gate\b", "shared_gate"),
    (r"^shared_experts?\.", "shared."),
    (r"\bw1\b", "gate_proj"),
    (r"\bw3\b|\bfc1\b", "up_proj"),
    (r"\bw2\b|\bfc2\b", "down_proj"),
    (r"^(fc1_latent_proj|routed_expert_down_proj)\b", "latent_down"),
    (r"^(fc2_latent_proj|routed_expert_up_proj)\b", "latent_up"),
    (r"^routed_expert_norm\b", "latent_norm"),
)
OUTSIDE = {
    "embed.weight": r"(embed_tokens|embeddings?|embed|wte|tok_embeddings)\.weight",
    "norm.weight": r"(norm|norm_f|final_layernorm|final_norm|ln_f)\.weight",
    "norm.bias": r"(norm|norm_f|final_layernorm|final_norm|ln_f)\.bias",
    "head.weight": r"(lm_head|head|output|embed_out)\.weight",
}
FUSED = {"gate_proj": (0, 2), "up_proj": (1, 2)}


@dataclass(slots=True)
class Pairing:
    """Our parameter names -> tensors, with {i} and {e} for layer and expert. guesses: pairs found by shape alone."""

    pairs: dict[str, set[str | Source]] = field(default_factory=dict)
    guesses: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def add(self, ours: str, theirs: str | Source) -> None:
        """Remember a pair."""
        self.pairs.setdefault(ours, set()).add(theirs)


def pair(targets: Iterable[Target], seen: Observation) -> Pairing:
    """Return which tensor fills which parameter."""
    found = Pairing()
    by_layer: dict[int | None, dict[str, tuple[int, ...]]] = {}
    for target in targets:
        place = re.match(r"layers\.(\d+)\.", target.name)
        name = re.sub(r"experts\.\d+\.", "experts.{e}.", target.name.removeprefix(place[0] if place else ""))
        by_layer.setdefault(int(place[1]) if place else None, {})[name] = target.shape
    for layer, ours in by_layer.items():
        if layer is None:
            _outside(found, ours, seen)
        else:
            _layer(found, ours, seen.layers[layer])
    return found


def _outside(found: Pairing, ours: Mapping[str, tuple[int, ...]], seen: Observation) -> None:
    free = dict(seen.outside)
    for name, shape in ours.items():
        spelling = re.compile(rf"(^|\.)({OUTSIDE[name]})$")
        fitting = [tensor for tensor in free if free[tensor] == shape and spelling.search(tensor)]
        if not fitting:
            found.left.add(name)
            continue
        del free[fitting[0]]
        found.add(name, _body(fitting[0], seen.prefix))


def _layer(found: Pairing, ours: Mapping[str, tuple[int, ...]], layer: LayerTensors) -> None:
    blocks = {"mixer": (layer.mixer_block, layer.mixer, MIXER_WORDS), "ffn": (layer.ffn_block, layer.ffn, FFN_WORDS)}
    for part, (block, tensors, words) in blocks.items():
        wanted = {name.partition(".")[2]: shape for name, shape in ours.items() if name.startswith(part + ".")}
        translated = {translate(tensor, words): tensor for tensor in tensors}
        free = dict(tensors)
        unmet = []
        for name, shape in wanted.items():
            tensor = translated.get(name)
            if tensor is not None and same(shape, tensors[tensor]):
                found.add(f"layers.{{i}}.{part}.{name}", f"{{body}}layers.{{i}}.{block}.{tensor}")
                free.pop(tensor, None)
            elif (source := fused(name, shape, tensors)) is not None:
                whole = f"{{body}}layers.{{i}}.{block}.{source.name}"
                found.add(f"layers.{{i}}.{part}.{name}", replace(source, name=whole))
            else:
                unmet.append(name)
        for name in unmet:
            fitting = [tensor for tensor, shape in free.items() if same(wanted[name], shape)]
            rivals = [other for other in unmet if same(wanted[name], wanted[other])]
            ours_name = f"layers.{{i}}.{part}.{name}"
            if len(fitting) == 1 and len(rivals) == 1:
                found.add(ours_name, f"{{body}}layers.{{i}}.{block}.{fitting[0]}")
                found.guesses[ours_name] = f"the only tensor of {block} with this shape"
                del free[fitting[0]]
            else:
                found.left.add(ours_name)
    _norms(found, [name for name in ours if name.partition(".")[0] in ("mixer_norm", "ffn_norm")], layer)
    for name in ours:
        residual = re.fullmatch(r"(mixer|ffn)_residual\.(fn|base|scale)", name)
        if residual:
            word = "attn" if residual[1] == "mixer" else "ffn"
            tensor = f"hc_{word}_{residual[2]}"
            if tensor in layer.rest:
                found.add(f"layers.{{i}}.{name}", f"{{body}}layers.{{i}}.{tensor}")
            else:
                found.left.add(f"layers.{{i}}.{name}")


def _norms(found: Pairing, wanted: list[str], layer: LayerTensors) -> None:
    """Pair the norms of a layer: by name where it tells, else in the order of the blocks."""
    first = re.compile(r"^(input_layernorm|attn_norm|attention_norm|norm1|ln_1|mixer_norm|operator_norm)\b")
    second = re.compile(r"^(post_attention_layernorm|ffn_norm|mlp_norm|norm2|ln_2)\b")
    for name in wanted:
        part, _, attribute = name.partition(".")
        signs = first if part == "mixer_norm" else second
        ending = [norm for norm in layer.norms if norm.endswith(f".{attribute}")]
        fitting = [norm for norm in ending if signs.search(norm)] or (ending if len(ending) == 1 else [])
        if fitting:
            found.add(f"layers.{{i}}.{name}", f"{{body}}layers.{{i}}.{fitting[0]}")
        else:
            found.left.add(f"layers.{{i}}.{name}")


def translate(tensor: str, words: Iterable[tuple[str, str]]) -> str:
    """Return a tensor name below its block in our spelling."""
    for spelling, ours in words:
        tensor = re.sub(spelling, ours, tensor, count=1)
    return tensor


def same(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether two shapes agree but for dimensions of size 1."""
    return [n for n in a if n != 1] == [n for n in b if n != 1] and prod(a) == prod(b)


def fused(name: str, shape: tuple[int, ...], tensors: Mapping[str, tuple[int, ...]]) -> Source | None:
    """Return where an expert's projection lies in a tensor of all experts, None if there is none of that shape."""
    expert = re.fullmatch(r"experts\.\{e\}\.(gate_proj|up_proj|down_proj)\.weight", name)
    gate_up, down = (tensors.get(f"experts.{fusion}", ())[1:] for fusion in ("gate_up_proj", "down_proj"))
    if not expert or len(gate_up) != 2 or len(down) != 2 or len(shape) != 2:
        return None
    chunk = FUSED.get(expert[1])
    # stored [in, out]: both tensors tell, since one alone may be square
    transpose = gate_up == (down[1], 2 * down[0])
    stored = gate_up if chunk else down
    if (stored[::-1] if transpose else stored) != (shape[0] * (2 if chunk else 1), shape[1]):
        return None
    return Source(
        name="experts.gate_up_proj" if chunk else "experts.down_proj", expert=True, chunk=chunk, transpose=transpose
    )


def _body(tensor: str, prefix: str) -> str:
    return "{body}" + tensor.removeprefix(prefix) if prefix and tensor.startswith(prefix) else tensor


def rules(pairs: Mapping[str, set[str | Source]], base: NameMap = DECODER) -> dict[str, Rule]:
    """Return the fewest prefix rules, beyond those of a base map, that give every pair."""
    made: dict[str, list[str | Source]] = {}
    for ours, theirs in pairs.items():
        for tensor in sorted(theirs, key=str):
            key, template = stripped(ours, tensor)
            if template not in made.setdefault(key, []):
                made[key].append(template)
    while lacks := [(ours, tensor) for ours, theirs in pairs.items() for tensor in theirs - given(ours, made, base)]:
        for ours, tensor in lacks:
            key = longest(ours, made, base)
            rest = ours.removeprefix(key)
            # the rule that wins can give it, or it needs a rule of its own
            able = isinstance(tensor, str) and tensor.endswith(rest)
            template = tensor.removesuffix(rest) if isinstance(tensor, str) and able else tensor
            at = made.setdefault(key if able else ours, [])
            at += [] if template in at else [template]
    for key in sorted(made, key=len, reverse=True):
        without = {other: templates for other, templates in made.items() if other != key}
        if all(theirs <= given(ours, without, base) for ours, theirs in pairs.items()):
            made = without
    return {key: templates[0] if len(templates) == 1 else tuple(templates) for key, templates in made.items()}


def longest(ours: str, made: Mapping[str, list[str | Source]], base: NameMap) -> str:
    """Return the key of the rule that wins for one of our names, "" if there is none."""
    return max((key for key in (*made, *base.rules) if ours == key or ours.startswith(key + ".")), key=len, default="")


def given(ours: str, made: Mapping[str, list[str | Source]], base: NameMap) -> set[str | Source]:
    """Return what the rules give for one of our names."""
    key = longest(ours, made, base)
    known = base.rules.get(key, ())
    options = made[key] if key in made else known if isinstance(known, tuple) else (known,)
    rest = ours.removeprefix(key)
    return {
        option + rest if isinstance(option, str) else replace(option, name=option.name + rest) for option in options
    }


def stripped(ours: str, tensor: str | Source) -> tuple[str, str | Source]:
    """Return a pair without the words that both end in."""
    if isinstance(tensor, Source):
        return ours, tensor
    left, right = ours.split("."), tensor.split(".")
    while len(left) > 1 and len(right) > 1 and left[-1] == right[-1] and left[-2] != "{i}":
        left.pop()
        right.pop()
    return ".".join(left), ".".join(right)
