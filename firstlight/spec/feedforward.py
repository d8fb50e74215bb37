"""Feed-forwards as data: linear units, gated or not, and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firstlight.spec.choices import check_choices
from firstlight.spec.noun import NewNoun, Nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Activation of a feed-forward, gated but for the last.

    silu: silu(g) u. clamp: silu(min(g, limit)) clamp(u, -limit, limit). gelu_tanh: gelu(g) u, by its tanh
    approximation. relu2: relu(x)^2 without a gate.
    """

    kind: Literal["silu", "clamp", "gelu_tanh", "relu2"] = "silu"
    limit: float | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        if (self.kind == "clamp") != (self.limit is not None):
            raise ValueError(f"clamp alone has a limit, and needs one: got kind={self.kind!r}, limit={self.limit}")

    @property
    def gated(self) -> bool:
        """True if a gate projection stands beside the up projection."""
        return self.kind != "relu2"

    @property
    def operator(self) -> str:
        """Name of the operator that computes it."""
        return "glu" if self.gated else "activation"


SILU = Act()


@dataclass(frozen=True, slots=True, kw_only=True)
class GLU:
    """down(act(gate x, up x)); down(act(up x)) where the activation is not gated."""

    intermediate_size: int
    act: Act = SILU
    bias: bool = False

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this feed-forward calls."""
        return ("linear", self.act.operator)


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

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert every token visits, added with weight 1 or, with gate "sigmoid", sigmoid(w . x).

    act None: that of the routed experts.
    """

    intermediate_size: int
    gate: Literal["none", "sigmoid"] = "none"
    act: Act | None = None

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Routed experts in a narrower width: up(norm(experts(down x))). Router and shared expert read the whole x.

    norm: rms over the latent width, of the weighted sum of the experts.
    """

    size: int
    norm: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Mixture of experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router: Router
    act: Act = SILU
    shared: SharedExpert | None = None
    latent: Latent | None = None

    def shared_unit(self) -> GLU | None:
        """The shared expert as a feed-forward of its own, without its gate."""
        if self.shared is None:
            return None
        return GLU(intermediate_size=self.shared.intermediate_size, act=self.shared.act or self.act)

    def operators(self) -> tuple[str, ...]:
        """Names of the operators this feed-forward calls."""
        names = ["router", "experts"]
        names += ["linear"] if self.latent else []
        names += ["rms_norm"] if self.latent and self.latent.norm else []
        unit = self.shared_unit()
        names += unit.operators() if unit else ()
        names += ["shared_gate"] if self.shared and self.shared.gate != "none" else []
        return tuple(dict.fromkeys(names))


FeedForward = GLU | MoE | NewNoun | Nothing
