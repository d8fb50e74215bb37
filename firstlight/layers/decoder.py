"""The one decoder: builds any ArchSpec from the layers. T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.layers.attention import GroupedQueryAttention
from firstlight.layers.context import LayerContext, Ops, StepContext
from firstlight.layers.declared import DeclaredLayer
from firstlight.layers.latent_attention import LatentAttention
from firstlight.layers.linear import Embedding, Linear
from firstlight.layers.mlp import GatedMLP
from firstlight.layers.moe import MoELayer
from firstlight.layers.norm import NormLayer
from firstlight.layers.parameter import Module
from firstlight.layers.recurrent import DeltaAttention
from firstlight.layers.residual import build_residual, finish, start
from firstlight.layers.state_space import StateSpace
from firstlight.spec.arch import ArchSpec, Layer, Residual
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2, MLAttention
from firstlight.spec.noun import Nothing

MIXERS: dict[type, Callable[[int, Any], Module]] = {
    GQAttention: GroupedQueryAttention,
    MLAttention: LatentAttention,
    DeltaRule: DeltaAttention,
    Mamba2: StateSpace,
}
FEED_FORWARDS: dict[type, Callable[[int, Any], Module]] = {GLU: GatedMLP, MoE: MoELayer}


class DecoderLayer(Module):
    """norm, mixer, norm, feed-forward, each around the residual that the ArchSpec declares."""

    def __init__(self, hidden_size: int, spec: Layer, residual: Residual) -> None:
        super().__init__()
        if not isinstance(spec.mixer, Nothing):
            self.mixer_residual = build_residual(hidden_size, residual)
            self.mixer_norm = NormLayer(hidden_size, spec.norm)
            self.mixer = MIXERS.get(type(spec.mixer), DeclaredLayer)(hidden_size, spec.mixer)
        if not isinstance(spec.ffn, Nothing):
            self.ffn_residual = build_residual(hidden_size, residual)
            self.ffn_norm = NormLayer(hidden_size, spec.norm)
            self.ffn = FEED_FORWARDS.get(type(spec.ffn), DeclaredLayer)(hidden_size, spec.ffn)
        self.sub_layers = tuple(name for name in ("mixer", "ffn") if hasattr(self, name))

    def forward(self, x: Tensor, ctx: LayerContext) -> Tensor:
        """Return the stream(s) after this layer, shaped as x."""
        for name in self.sub_layers:
            residual, norm, sub_layer = (getattr(self, f"{name}{part}") for part in ("_residual", "_norm", ""))
            h, carry = residual(x, ctx.ops)
            x = residual.write(x, sub_layer(norm(h, ctx.ops), ctx), carry, ctx.ops)
        return x


class Decoder(Module):
    """Embedding, layers, final norm, head. Built on the meta device; weights arrive by the loader."""

    head: Linear | None

    def __init__(self, arch: ArchSpec) -> None:
        super().__init__()
        self.arch = arch
        self.embed = Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(arch.hidden_size, layer, arch.residual) for layer in arch.layers)
        self.norm = NormLayer(arch.hidden_size, arch.norm)
        self.head = None if arch.tie_word_embeddings else Linear(arch.hidden_size, arch.vocab_size)

    @classmethod
    def build(cls, arch: ArchSpec, dtype: torch.dtype) -> Decoder:
        """Return a decoder whose parameters are on the meta device in dtype, fp32 where the layer asks."""
        with default_dtype(dtype):
            return cls(arch)

    def forward(self, ids_T: Tensor, step: StepContext) -> Tensor:
        """Return the normed hidden states [T, H] of every token of the step."""
        x = self.begin(ids_T, step.model_ops)
        for index, layer in enumerate(self.layers):
            x = layer(x, step.layer(index))
        return self.end(x, step.model_ops)

    def begin(self, ids_T: Tensor, ops: Ops) -> Tensor:
        """Return the stream(s) that enter the first layer."""
        return start(self.embed(ids_T, ops), self.arch.residual)

    def end(self, x: Tensor, ops: Ops) -> Tensor:
        """Return the normed hidden states [T, H] of the stream(s) that leave the last layer."""
        normed: Tensor = self.norm(finish(x, self.arch.residual, ops), ops)
        return normed

    def logits(self, hidden_TH: Tensor, ops: Ops) -> Tensor:
        """Return [T, V] in the model's dtype."""
        weight = self.embed.weight if self.head is None else self.head.weight
        out: Tensor = ops.linear(hidden_TH, weight, None)
        return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make dtype that of new parameters inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
