"""Feed-forwards as data: gated linear units and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Activation of a gated unit. silu: silu(g) u. clamp: silu(min(g, limit)) clamp(u, -limit, limit)."""

    kind: Literal["silu", "clamp"] = "silu"
    limit: float | None = None


SILU = Act()


@dataclass(frozen=True, slots=True, kw_only=True)
class GLU:
    """down(act(gate x, up x))."""

    intermediate_size: int
    act: Act = SILU
    bias: bool = False

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this feed-forward calls."""
        return ("linear", "glu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses experts and their weights; logits in fp32.

    score: sigmoid | softmax over all experts. bias "selection": added for the choice only, fp32.
    groups: the best `topk_groups` of `num_groups` (sum of their two best) compete.
    renorm: weights divided by their sum. scale: applied last.
    """

    score: Literal["sigmoid", "softmax"]
    bias: Literal["none", "selection"] = "none"
    num_groups: int = 1
    topk_groups: int = 1
    renorm: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert every token visits, added with weight 1 or, with gate "sigmoid", sigmoid(w . x)."""

    intermediate_size: int
    gate: Literal["none", "sigmoid"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Mixture of gated experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router: Router
    act: Act = SILU
    shared: SharedExpert | None = None

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this feed-forward calls."""
        names = ["router", "experts"]
        names += ["linear", "glu"] if self.shared else []
        names += ["shared_gate"] if self.shared and self.shared.gate != "none" else []
        return tuple(names)


FeedForward = GLU | MoE
