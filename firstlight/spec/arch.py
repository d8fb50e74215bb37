"""ArchSpec: what a model is. Frozen, printable, serialisable; no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from firstlight.errors import FirstlightError
from firstlight.spec.feedforward import FeedForward
from firstlight.spec.mixers import Mixer, MLAttention
from firstlight.spec.norm import Norm
from firstlight.spec.noun import NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class PreNorm:
    """x <- x + f(norm(x)), for the mixer and then for the feed-forward."""

    operators: ClassVar[tuple[str, ...]] = ()
    head_operators: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """`mult` residual streams; each sub-layer reads a learned mix and writes back through a
    Sinkhorn-normalised one. The head is the mean over streams."""

    mult: int
    sinkhorn_iters: int
    eps: float
    norm_eps: float
    operators: ClassVar[tuple[str, ...]] = ("hyper_read", "hyper_write")
    head_operators: ClassVar[tuple[str, ...]] = ("hyper_head",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttnRes:
    """Each sub-layer reads an attention over the outputs of earlier blocks of `block_size` layers."""

    block_size: int
    operators: ClassVar[tuple[str, ...]] = ("attn_res",)
    head_operators: ClassVar[tuple[str, ...]] = ("attn_res",)


Residual = PreNorm | HyperConnections | BlockAttnRes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: norm, mixer, norm, feed-forward. A layer of one operation leaves the other out."""

    norm: Norm
    mixer: Mixer = NOTHING
    ffn: FeedForward = NOTHING

    def operators(self) -> tuple[str, ...]:
        """Names of the operators of mixer, feed-forward and norms, without repeats, in order of use."""
        norms = (norm_operator(self.norm),)
        return tuple(dict.fromkeys(norms + self.mixer.operators() + self.ffn.operators()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """A decoder-only language model.

    model_type: name of the port. mtp_layers: multi-token-prediction layers in the checkpoint, not run.
    Raises: FirstlightError where layers contradict each other (a first layer with a shared index).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    norm: Norm
    residual: Residual
    tie_word_embeddings: bool = False
    mtp_layers: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        seen_full = False
        for i, layer in enumerate(self.layers):
            indexer = layer.mixer.indexer if isinstance(layer.mixer, MLAttention) else None
            if indexer and indexer.mode == "shared" and not seen_full:
                raise FirstlightError(
                    f"layer {i} shares an index selection, but no earlier layer owns an indexer",
                    where="indexer_types and layer_types",
                    why="a shared selection is that of the last layer that scores by itself",
                    fix="compare with the config.json of the release",
                )
            seen_full |= bool(indexer and indexer.mode == "full")

    def operators(self) -> tuple[str, ...]:
        """Names of the operators outside the layers: embedding, end of the residual, final norm, head."""
        return ("embedding", *self.residual.head_operators, norm_operator(self.norm), "linear")

    def layer_operators(self, index: int) -> tuple[str, ...]:
        """Names of the operators of one layer, its residual included."""
        return tuple(dict.fromkeys(self.residual.operators + self.layers[index].operators()))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data; each noun carries its class name under "noun"."""
        described: dict[str, Any] = describe(self)
        return described


def norm_operator(norm: Norm) -> str:
    """Return the operator that computes a norm."""
    return "layer_norm" if norm.kind == "layer" else "rms_norm"


def describe(value: Any) -> Any:
    """Return a spec noun as JSON-ready data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"noun": type(value).__name__, **{f.name: describe(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    return value
