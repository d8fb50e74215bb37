"""Gated delta rule (KDA, gated DeltaNet) behind a short convolution.

T tokens, H hidden, J value heads, K key dim, V value dim, C convolution channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.norm import GatedNorm
from firstlight.layers.parameter import Module
from firstlight.layers.short_conv import ShortConv
from firstlight.spec.mixers import DeltaRule


class DeltaAttention(Module):
    """S <- Diag(exp g) S + k (beta (v - S^T k))^T, read after the write; gated norm; output projection."""

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, hidden_size: int, spec: DeltaRule) -> None:
        super().__init__()
        self.spec = spec
        f_rank, g_rank = spec.decay.rank, spec.output_gate.rank
        self.in_proj = MergedLinear(hidden_size, input_widths(spec))
        self.conv = ShortConv(spec.conv_kernel_size, conv_channels(spec))
        self.f_b_proj = Linear(f_rank, spec.decay_dim) if f_rank else None
        self.g_b_proj = Linear(g_rank, spec.value_dim) if g_rank else None
        self.add_parameter("A_log", (spec.num_v_heads,), dtype=torch.float32)
        self.add_parameter("dt_bias", (spec.decay_dim,), dtype=torch.float32)
        self.o_norm = GatedNorm(spec.head_v_dim, eps=spec.norm_eps, act=spec.output_gate.act)
        self.o_proj = Linear(spec.value_dim, hidden_size)

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH; reads and writes the state and window slots of the rows."""
        spec, ops = self.spec, ctx.ops
        qkv_TC, b_TJ, decay, gate = split_inputs(self.in_proj(x_TH, ops), spec)
        q, k, v = self.conv(qkv_TC, ctx).split((spec.key_dim, spec.key_dim, spec.value_dim), dim=-1)
        decay = decay if self.f_b_proj is None else self.f_b_proj(decay, ops)
        gate = gate if self.g_b_proj is None else self.g_b_proj(gate, ops)
        per_head = (spec.num_v_heads, spec.head_k_dim) if spec.decay.granularity == "channel" else (spec.num_v_heads,)
        dt_bias = self.dt_bias.view(per_head)
        form, bound = spec.decay.form, spec.decay.lower_bound
        g = ops.decay_gate(decay.unflatten(-1, per_head), self.A_log, dt_bias, form=form, lower_bound=bound)
        o_TJV = ops.delta_rule(
            q.unflatten(-1, (spec.num_k_heads, spec.head_k_dim)),
            k.unflatten(-1, (spec.num_k_heads, spec.head_k_dim)),
            v.unflatten(-1, (spec.num_v_heads, spec.head_v_dim)),
            g,
            torch.sigmoid(b_TJ.float()),
            ctx.cache.states["recurrent"],
            ctx.rows,
        )
        o_TJV = self.o_norm(o_TJV, gate.unflatten(-1, (spec.num_v_heads, spec.head_v_dim)), ops)
        out: Tensor = self.o_proj(o_TJV.flatten(1), ops)
        return out


def conv_channels(spec: DeltaRule) -> dict[str, int]:
    """Return the convolutions by number of channels, in storage order."""
    if spec.qkv_layout != "separate":
        return {"conv1d": spec.conv_dim}
    return {"q_conv1d": spec.key_dim, "k_conv1d": spec.key_dim, "v_conv1d": spec.value_dim}


def input_widths(spec: DeltaRule) -> dict[str, int]:
    """Return the projections of the hidden state by width, in storage order."""
    if spec.qkv_layout == "qkvz_grouped":
        return {"qkvz_proj": spec.conv_dim + spec.value_dim, "ba_proj": 2 * spec.num_v_heads}
    widths = {"q_proj": spec.key_dim, "k_proj": spec.key_dim, "v_proj": spec.value_dim}
    if spec.qkv_layout == "qkv_z_b_a":
        widths = {"qkv_proj": spec.conv_dim}
    f_rank, g_rank = spec.decay.rank, spec.output_gate.rank
    decay = {"f_a_proj": f_rank} if f_rank else {"f_proj": spec.decay_dim}
    gate = {"g_a_proj": g_rank} if g_rank else {"g_proj": spec.value_dim}
    return {**widths, "b_proj": spec.num_v_heads, **decay, **gate}


def split_inputs(projected: tuple[Tensor, ...], spec: DeltaRule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return [q, k, v] of the convolution, [T, C], write strength, decay and gate (or their low-rank halves)."""
    if spec.qkv_layout != "qkvz_grouped":
        *qkv, b_TJ, decay, gate = projected
        return qkv[0] if len(qkv) == 1 else torch.cat(qkv, dim=-1), b_TJ, decay, gate
    per_group = spec.num_v_heads // spec.num_k_heads
    keys, values = spec.head_k_dim, spec.head_v_dim * per_group
    qkvz, ba = (part.view(-1, spec.num_k_heads, part.shape[-1] // spec.num_k_heads) for part in projected)
    q, k, v, gate = (part.flatten(1) for part in torch.split(qkvz, [keys, keys, values, values], dim=-1))
    b_TJ, decay = (part.flatten(1) for part in torch.split(ba, per_group, dim=-1))
    return torch.cat((q, k, v), dim=-1), b_TJ, decay, gate
