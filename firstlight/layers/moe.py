"""Mixture of experts. T tokens, H hidden, E experts, K chosen, I intermediate."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext, Ops
from firstlight.layers.mlp import GatedMLP
from firstlight.layers.parameter import Module, Part
from firstlight.spec.feedforward import GLU, MoE


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
    """The weights of all experts: gate_up [E, 2I, H], gate first; down [E, H, I]."""

    def __init__(self, hidden_size: int, spec: MoE) -> None:
        super().__init__()
        self.spec = spec
        count, width = spec.num_experts, spec.moe_intermediate_size
        halves = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
        gate_up = tuple(Part(f"{e}.{name}.weight", (e, rows)) for e in range(count) for name, rows in halves)
        down = tuple(Part(f"{e}.down_proj.weight", (e,)) for e in range(count))
        self.add_parameter("gate_up", (count, 2 * width, hidden_size), parts=gate_up)
        self.add_parameter("down", (count, hidden_size, width), parts=down)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, ops: Ops) -> Tensor:
        """Return the weighted sum over the chosen experts, y_TH."""
        act = self.spec.act
        y: Tensor = ops.experts(x_TH, ids_TK, weights_TK, self.gate_up, self.down, kind=act.kind, limit=act.limit)
        return y


class MoELayer(Module):
    """Routed experts plus the shared one, which is never scaled."""

    shared: GatedMLP | None

    def __init__(self, hidden_size: int, spec: MoE) -> None:
        super().__init__()
        self.router = RouterLayer(hidden_size, spec)
        self.experts = Experts(hidden_size, spec)
        self.shared = None
        if spec.shared:
            self.shared = GatedMLP(hidden_size, GLU(intermediate_size=spec.shared.intermediate_size, act=spec.act))

    def forward(self, x_TH: Tensor, ctx: LayerContext) -> Tensor:
        """Return y_TH."""
        weights_TK, ids_TK = self.router(x_TH, ctx.ops)
        y_TH: Tensor = self.experts(x_TH, ids_TK, weights_TK, ctx.ops)
        return y_TH if self.shared is None else y_TH + self.shared(x_TH, ctx)
