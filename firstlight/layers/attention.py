"""Grouped-query attention. T tokens, N heads, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.gate import GateProjection
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.norm import NormLayer
from firstlight.layers.parameter import Module
from firstlight.layers.rope import RotaryLayer
from firstlight.spec.mixers import GQAttention


class GroupedQueryAttention(Module):
    """Attention over paged keys and values of the whole history, or of a window; its output may be gated."""

    sinks: Tensor | None

    def __init__(self, hidden_size: int, spec: GQAttention) -> None:
        super().__init__()
        self.spec = spec
        q_width, kv_width = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        gate = spec.output_gate
        beside_q = gate is not None and gate.source == "q_proj"
        outputs = {"q_proj": q_width * (2 if beside_q else 1), "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = MergedLinear(hidden_size, outputs, biased=tuple(outputs) if spec.bias else ())
        self.q_norm = NormLayer(spec.head_dim, spec.qk_norm) if spec.qk_norm else None
        self.k_norm = NormLayer(spec.head_dim, spec.qk_norm) if spec.qk_norm else None
        self.rope = RotaryLayer(spec.rope) if spec.rope else None
        self.gate = GateProjection(hidden_size, q_width, gate.rank) if gate and not beside_q else None
        self.o_proj = Linear(q_width, hidden_size, bias=spec.out_bias)
        if spec.sinks:
            self.add_parameter("sinks", (spec.num_attention_heads,))
        else:
            self.sinks = None

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH; writes keys and values of the step into the pages first."""
        spec = self.spec
        q, k, v = self.qkv(x_TH, ctx.ops)
        k, v = k.unflatten(-1, (-1, spec.head_dim)), v.unflatten(-1, (-1, spec.head_dim))
        # with a gate, each head is [q, gate]
        q, *gate = q.unflatten(-1, (spec.num_attention_heads, -1)).split(spec.head_dim, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, ctx.ops), self.k_norm(k, ctx.ops)
        if self.rope is not None:
            q, k = self.rope(q, ctx), self.rope(k, ctx)
        kv = ctx.cache.pages["kv"]
        ctx.ops.cache_write(torch.stack((k, v), dim=1), kv, ctx.rows)
        window = spec.sliding_window
        out_TND = ctx.ops.attention(q, kv, ctx.rows, scaling=spec.scaling, sliding_window=window, sinks_N=self.sinks)
        if spec.output_gate is not None:
            gate_TND = gate[0] if self.gate is None else self.gate(x_TH, ctx.ops).view_as(out_TND)
            out_TND = ctx.ops.output_gate(out_TND, gate_TND, act=spec.output_gate.act)
        out: Tensor = self.o_proj(out_TND.flatten(1), ctx.ops)
        return out
