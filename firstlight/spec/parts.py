"""What a model is made of: its distinct nouns, each with a short label and the places where it stands.

Layers are numbered from 0, as in checkpoint names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections, PreNorm, Residual, norm_operator
from firstlight.spec.feedforward import GLU, FeedForward, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2, Mixer, MLAttention
from firstlight.spec.norm import Norm
from firstlight.spec.noun import NewNoun, Nothing

Noun = ArchSpec | Mixer | FeedForward | Norm | Residual
Kind = Literal["embedding", "mixer", "index", "feed-forward", "norm", "residual", "head"]

OUTSIDE = -1  # the place before the first layer or after the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One noun, whatever number of layers share it. places: layer numbers, and OUTSIDE.

    An index branch is a part of its own (kind "index"); its noun is the attention that owns it.
    """

    kind: Kind
    label: str
    noun: Noun
    places: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers it stands in."""
        return tuple(place for place in self.places if place != OUTSIDE)


def parts(arch: ArchSpec) -> tuple[Part, ...]:
    """Return the parts of a model, embedding first, head last; labels are unique."""
    found: dict[tuple[Kind, Noun], list[int]] = {("embedding", arch): [OUTSIDE]}

    def add(kind: Kind, noun: Noun, place: int) -> None:
        found.setdefault((kind, noun), []).append(place)

    for place, layer in enumerate(arch.layers):
        if not isinstance(layer.mixer, Nothing):
            add("mixer", layer.mixer, place)
        if isinstance(layer.mixer, MLAttention) and layer.mixer.indexer and layer.mixer.indexer.mode == "full":
            add("index", layer.mixer, place)
        if not isinstance(layer.ffn, Nothing):
            add("feed-forward", layer.ffn, place)
        add("norm", layer.norm, place)
        if not isinstance(arch.residual, PreNorm):
            add("residual", arch.residual, place)
    add("norm", arch.norm, OUTSIDE)
    if arch.residual.head_operators:
        add("residual", arch.residual, OUTSIDE)
    add("head", arch, OUTSIDE)
    made = [
        Part(kind=kind, label=label(kind, noun), noun=noun, places=tuple(places), operators=_operators(kind, noun))
        for (kind, noun), places in found.items()
    ]
    return _told_apart(made)


def _operators(kind: Kind, noun: Noun) -> tuple[str, ...]:
    if isinstance(noun, ArchSpec):
        return ("embedding",) if kind == "embedding" else ("linear",)
    if isinstance(noun, Norm):
        return (norm_operator(noun),)
    if isinstance(noun, (PreNorm, HyperConnections, BlockAttnRes)):
        return tuple(dict.fromkeys(noun.operators + noun.head_operators))
    if not isinstance(noun, MLAttention) or noun.indexer is None:
        return noun.operators()
    attention = without_index(noun).operators()
    return attention if kind == "mixer" else tuple(name for name in noun.operators() if name not in attention)


def without_index(mixer: MLAttention) -> MLAttention:
    """Return the attention as a layer sees it that owns no index branch and reuses a selection."""
    if mixer.indexer is None:
        return mixer
    return replace(mixer, indexer=replace(mixer.indexer, mode="shared"))


def label(kind: Kind, noun: Noun) -> str:
    """Return a short name of a noun in its role."""
    if isinstance(noun, ArchSpec):
        return kind if kind == "embedding" or not noun.tie_word_embeddings else f"{kind} (tied)"
    if isinstance(noun, NewNoun):
        return noun.label
    if isinstance(noun, MLAttention):
        return index_label(noun) if kind == "index" else latent_label(noun)
    if isinstance(noun, GQAttention):
        return _gated(noun) + (f"GQA(window {noun.sliding_window})" if noun.sliding_window else "GQA")
    if isinstance(noun, DeltaRule):
        return "KDA" if noun.decay.granularity == "channel" else "GDN"
    if isinstance(noun, Mamba2):
        return "Mamba2"
    if isinstance(noun, MoE):
        latent = f", latent {noun.latent.size}" if noun.latent else ""
        return f"MoE({noun.num_experts}, top {noun.num_experts_per_tok}{latent})"
    if isinstance(noun, GLU):
        return f"{'GLU' if noun.act.gated else 'MLP'}({noun.intermediate_size})"
    if isinstance(noun, Norm):
        return {"rms": "RMSNorm", "rms1p": "RMSNorm(1 + w)", "layer": "LayerNorm"}[noun.kind]
    if isinstance(noun, HyperConnections):
        return f"hyper-connections({noun.mult})"
    return f"block residual attention({noun.block_size})" if isinstance(noun, BlockAttnRes) else "pre-norm"


def latent_label(mixer: MLAttention) -> str:
    """Return the label of a latent attention; one that owns no index says so."""
    if mixer.indexer is None:
        return f"{_gated(mixer)}MLA"
    reused = ", shared" if mixer.indexer.mode == "shared" else ""
    return f"{_gated(mixer)}sparse MLA(top {mixer.indexer.topk}{reused})"


def _gated(mixer: GQAttention | MLAttention) -> str:
    return "gated " if mixer.output_gate else ""


def index_label(mixer: MLAttention) -> str:
    """Return the label of the index branch of a latent attention."""
    assert mixer.indexer is not None, "an index part has an indexer"
    pool = mixer.indexer.pool
    return f"index(pools of {pool.size})" if pool else "index"


def _told_apart(made: list[Part]) -> tuple[Part, ...]:
    by_label: dict[str, list[Part]] = {}
    for part in made:
        by_label.setdefault(part.label, []).append(part)
    return tuple(replace(part, label=part.label + _difference(part.noun, by_label[part.label])) for part in made)


def _difference(noun: Noun, alike: list[Part]) -> str:
    if len(alike) == 1:
        return ""
    assert is_dataclass(noun), f"{type(noun).__name__} is a dataclass"
    names = [f.name for f in fields(noun) if len({repr(getattr(part.noun, f.name)) for part in alike}) > 1]
    return f" [{', '.join(f'{name}={getattr(noun, name)}' for name in names)}]"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in folded form: "1-3,5-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def where(places: Sequence[int], num_layers: int, *, most: int = 4) -> str:
    """Return a readable place: "all 45 layers", "layers 3,7,11,15,... (11 of 45)", "outside the layers"."""
    layers = [place for place in places if place != OUTSIDE]
    outside = "outside the layers" if OUTSIDE in places else ""
    if not layers:
        return outside
    text = f"all {num_layers} layers"
    if len(layers) < num_layers:
        runs = ranges(layers).split(",")
        shown = ",".join(runs[:most]) + (",..." if len(runs) > most else "")
        text = f"layer{'s' if len(layers) > 1 else ''} {shown} ({len(layers)} of {num_layers})"
    return f"{text} and {outside}" if outside else text


def fold_layers(arch: ArchSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (pattern, layer numbers), in order of first appearance: ("KDA + MoE(288, top 8)", (4, 5, ...))."""
    labels = {(part.kind, part.noun): part.label for part in parts(arch)}
    folded: dict[str, list[int]] = {}
    for index, layer in enumerate(arch.layers):
        present: tuple[tuple[Kind, Noun], ...] = (("mixer", layer.mixer), ("feed-forward", layer.ffn))
        pattern = " + ".join(labels[kind, noun] for kind, noun in present if (kind, noun) in labels)
        folded.setdefault(pattern, []).append(index)
    return tuple((pattern, tuple(numbers)) for pattern, numbers in folded.items())
