"""Mixture of experts. T tokens, H hidden (for the experts, the width of their input), E experts, K chosen,
I intermediate."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext, Ops
from firstlight.layers.linear import Linear
from firstlight.layers.mlp import GatedMLP
from firstlight.layers.norm import NormLayer
from firstlight.layers.parameter import Module, Part
from firstlight.spec.feedforward import MoE
from firstlight.spec.norm import Norm


class RouterLayer(Module):
    """Chooses experts; the selection bias stays fp32."""

    bias: Tensor | None

    def __init__(self, hidden_size: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        self.add_parameter("weight", (spec.num_experts, hidden_size))
        if spec.router.bias == "selection":
            self.add_parameter("bias", (spec.num_experts,), dtype=torch.float32)
        else:
            self.bias = None

    def forward(self, x_TH: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return (weights fp32 [T, K], expert numbers int32 [T, K])."""
        rule = self.spec.router
        chosen: tuple[Tensor, Tensor] = ops.router(
            x_TH,
            self.weight,
            self.bias,
            score=rule.score,
            top_k=self.spec.num_experts_per_tok,
            num_groups=rule.num_groups,
            topk_groups=rule.topk_groups,
            renorm=rule.renorm,
            scale=rule.scale,
        )
        return chosen


class Experts(Module):
    """The weights of all experts: gate_up [E, 2I, H], gate first, or up [E, I, H] without a gate; down [E, H, I]."""

    def __init__(self, hidden_size: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        count, width = spec.num_experts, spec.moe_intermediate_size
        names = ("gate_proj", "up_proj") if spec.act.gated else ("up_proj",)
        halves = tuple((name, slice(i * width, (i + 1) * width)) for i, name in enumerate(names))
        first = tuple(Part(f"{e}.{name}.weight", (e, rows)) for e in range(count) for name, rows in halves)
        down = tuple(Part(f"{e}.down_proj.weight", (e,)) for e in range(count))
        self.first = "gate_up" if spec.act.gated else "up"
        self.add_parameter(self.first, (count, len(names) * width, hidden_size), parts=first)
        self.add_parameter("down", (count, hidden_size, width), parts=down)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, ops: Ops) -> Tensor:
        """Return the weighted sum over the chosen experts, y_TH."""
        act, first = self.spec.act, self.get_parameter(self.first)
        y: Tensor = ops.experts(x_TH, ids_TK, weights_TK, first, self.down, kind=act.kind, limit=act.limit)
        return y


class MoELayer(Module):
    """Routed experts, in a latent width if any, plus the shared one, which is gated but never scaled."""

    def __init__(self, hidden_size: int, spec: MoE) -> None:
        super().__init__()
        latent, unit = spec.latent, spec.shared_unit()
        width = latent.size if latent else hidden_size
        self.router = RouterLayer(hidden_size, spec)
        self.experts = Experts(width, spec)
        self.latent_down = Linear(hidden_size, width) if latent else None
        self.latent_norm = NormLayer(width, Norm(eps=latent.norm_eps)) if latent and latent.norm else None
        self.latent_up = Linear(width, hidden_size) if latent else None
        self.shared = GatedMLP(hidden_size, unit) if unit else None
        gated = spec.shared is not None and spec.shared.gate == "sigmoid"
        self.shared_gate = Linear(hidden_size, 1) if gated else None

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH."""
        weights_TK, ids_TK = self.router(x_TH, ctx.ops)
        y_TH = self.routed(x_TH, ids_TK, weights_TK, ctx.ops)
        if self.shared is None:
            return y_TH
        shared_TH: Tensor = self.shared(x_TH, ctx)
        if self.shared_gate is not None:
            shared_TH = ctx.ops.shared_gate(shared_TH, x_TH, self.shared_gate.weight)
        return y_TH + shared_TH

    def routed(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, ops: Ops) -> Tensor:
        """Return what the chosen experts add, y_TH."""
        narrow = x_TH if self.latent_down is None else self.latent_down(x_TH, ops)
        y: Tensor = self.experts(narrow, ids_TK, weights_TK, ops)
        if self.latent_norm is not None:
            y = self.latent_norm(y, ops)
        return y if self.latent_up is None else self.latent_up(y, ops)
