"""Latent attention (MLA), dense or over an index selection.

T tokens, H hidden, N heads, C latent rank, R decoupled rotary dims. Differs from GroupedQueryAttention:
one cached row [C + R] per token serves all heads; keys and values are projections of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.gate import GateProjection
from firstlight.layers.indexer import IndexLayer
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.norm import NormLayer
from firstlight.layers.parameter import Module
from firstlight.layers.rope import RotaryLayer
from firstlight.spec.mixers import MLAttention
from firstlight.spec.norm import Norm


class LatentAttention(Module):
    """MLA with or without a low-rank query, rotary columns, an indexer and a gate on its output."""

    indexer: IndexLayer | None

    def __init__(self, hidden_size: int, spec: MLAttention) -> None:
        super().__init__()
        self.spec = spec
        heads, latent_norm = spec.num_attention_heads, Norm(eps=spec.latent_norm_eps)
        q_width = heads * spec.qk_head_dim
        first = {"q_proj": q_width} if spec.q_lora_rank is None else {"q_a_proj": spec.q_lora_rank}
        outputs = {**first, "kv_a_proj": spec.latent_dim}
        # only low-rank projections carry the bias
        self.qkv_a = MergedLinear(hidden_size, outputs, biased=tuple(outputs) if spec.bias else ())
        self.q_a_norm = NormLayer(spec.q_lora_rank, latent_norm) if spec.q_lora_rank else None
        self.q_b_proj = Linear(spec.q_lora_rank, q_width) if spec.q_lora_rank else None
        self.kv_a_norm = NormLayer(spec.kv_lora_rank, latent_norm)
        self.rope = RotaryLayer(spec.rope) if spec.rope else None
        owns_index = spec.indexer is not None and spec.indexer.mode == "full"
        self.indexer = IndexLayer(hidden_size, spec) if owns_index else None
        self.kv_b_proj = Linear(spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim))
        gate = spec.output_gate
        self.gate = GateProjection(hidden_size, heads * spec.v_head_dim, gate.rank) if gate else None
        self.o_proj = Linear(heads * spec.v_head_dim, hidden_size, bias=spec.bias)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH; writes the latent rows of the step into the pages first."""
        spec, ops = self.spec, ctx.ops
        q_T, kv_a_T = self.qkv_a(x_TH, ops)
        q_latent_TQ = None
        if self.q_a_norm is not None and self.q_b_proj is not None:
            q_latent_TQ = self.q_a_norm(q_T, ops)
            q_T = self.q_b_proj(q_latent_TQ, ops)
        q_TND = q_T.unflatten(-1, (-1, spec.qk_head_dim))
        q_nope, q_rope = q_TND.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        c_TC, k_rope_TR = kv_a_T.split((spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1)
        c_TC = self.kv_a_norm(c_TC, ops)
        if self.rope is not None:
            q_rope = self.rope(q_rope, ctx)
            k_rope_TR = self.rope(k_rope_TR.unsqueeze(1), ctx).squeeze(1)
        latent = ctx.cache.pages["latent"]
        ops.cache_write(torch.cat((c_TC, k_rope_TR), dim=-1), latent, ctx.rows)
        scale = {"scaling": spec.scaling, "v_head_dim": spec.v_head_dim}
        if spec.indexer is None:
            out_TNV = ops.mla(q_nope, q_rope, latent, self.kv_b_proj.weight, ctx.rows, **scale)
        else:
            selection_TK = self.select(x_TH, q_latent_TQ, ctx)
            out_TNV = ops.sparse_mla(q_nope, q_rope, latent, selection_TK, self.kv_b_proj.weight, **scale)
        if spec.output_gate is not None and self.gate is not None:
            gate_TNV = self.gate(x_TH, ops).view_as(out_TNV)
            out_TNV = ops.output_gate(out_TNV, gate_TNV, act=spec.output_gate.act)
        out: Tensor = self.o_proj(out_TNV.flatten(1), ops)
        return out

    def select(self, x_TH: Tensor, q_latent_TQ: Tensor | None, ctx: LayerContext) -> Tensor:
        """Return the latent slots to read: this layer's own selection, or that of the last full indexer."""
        if self.indexer is not None:
            ctx.scratch.selection_TK = self.indexer(x_TH, q_latent_TQ, ctx)
        assert ctx.scratch.selection_TK is not None, "a shared index needs an earlier layer's selection"
        return ctx.scratch.selection_TK
