"""Mixtures of experts with a gated shared expert, a latent width or ungated experts, against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.one_layer import HIDDEN, Truth, assert_computes, randomised
from torch import Tensor

from firstlight.layers.moe import MoELayer
from firstlight.spec.feedforward import Act, Latent, MoE, Router, SharedExpert

pytest.importorskip("transformers")

from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

RELU2 = Act(kind="relu2")
GATED = MoE(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    router=Router(score="softmax"),
    shared=SharedExpert(intermediate_size=28, gate="sigmoid"),
)
UNGATED = MoE(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    router=Router(score="sigmoid", bias="selection", num_groups=2, topk_groups=1, scale=2.5),
    act=RELU2,
    shared=SharedExpert(intermediate_size=28),
)


def one_sequence(module: Any) -> Truth:
    """Return x_TH -> y_TH of a module that takes a batch."""
    return lambda x_TH: module(x_TH[None])[0]


def shared(module: Any) -> dict[str, Tensor]:
    """Return the weights of a shared expert."""
    return {f"shared.{name}": tensor for name, tensor in module.named_parameters()}


def qwen3_next_block() -> tuple[Any, dict[str, Tensor]]:
    """Return the module and its weights under our names."""
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
        shared_expert_intermediate_size=28, norm_topk_prob=True,
    )  # fmt: skip
    module = randomised(qwen3_next.Qwen3NextSparseMoeBlock(config))
    weights = {"router.weight": module.gate.weight, **shared(module.shared_expert)}
    weights["shared_gate.weight"] = module.shared_expert_gate.weight
    for e in range(8):
        gate, up = module.experts.gate_up_proj[e].chunk(2)
        weights |= {f"experts.{e}.gate_proj.weight": gate, f"experts.{e}.up_proj.weight": up}
        weights[f"experts.{e}.down_proj.weight"] = module.experts.down_proj[e]
    return module, weights


def nemotron_h_block(latent: int | None) -> tuple[Any, dict[str, Tensor]]:
    """Return the module and its weights under our names."""
    config = NemotronHConfig(
        hidden_size=HIDDEN, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28, moe_latent_size=latent, routed_scaling_factor=2.5, n_group=2,
        topk_group=1,
    )  # fmt: skip
    module = randomised(nemotron_h.NemotronHMoE(config, 0))
    weights = {
        "router.weight": module.gate.weight,
        "router.bias": module.gate.e_score_correction_bias,
        **shared(module.shared_experts),
    }
    for e in range(8):
        weights[f"experts.{e}.up_proj.weight"] = module.experts.up_proj[e]
        weights[f"experts.{e}.down_proj.weight"] = module.experts.down_proj[e]
    if latent:
        weights["latent_down.weight"] = module.fc1_latent_proj.weight
        weights["latent_up.weight"] = module.fc2_latent_proj.weight
    return module, weights


def test_a_gated_shared_expert_is_that_of_qwen3_next() -> None:
    module, weights = qwen3_next_block()
    assert_computes(MoELayer(HIDDEN, GATED), GATED, weights, one_sequence(module))


@pytest.mark.parametrize("latent", [None, 24])
def test_ungated_experts_with_or_without_a_latent_width_are_those_of_nemotron_h(latent: int | None) -> None:
    module, weights = nemotron_h_block(latent)
    spec = replace(UNGATED, latent=Latent(size=latent) if latent else None)
    assert_computes(MoELayer(HIDDEN, spec), spec, weights, one_sequence(module))


def test_the_norm_of_a_latent_width_is_taken_of_the_sum_of_the_experts() -> None:
    module, weights = nemotron_h_block(24)
    weights["latent_norm.weight"] = torch.randn(24, generator=torch.Generator().manual_seed(6))
    module.fc2_latent_proj.register_forward_pre_hook(
        lambda _, args: (
            args[0] / torch.sqrt(args[0].square().mean(-1, keepdim=True) + 1e-3) * weights["latent_norm.weight"]
        )
    )
    spec = replace(UNGATED, latent=Latent(size=24, norm=True, norm_eps=1e-3))
    assert_computes(MoELayer(HIDDEN, spec), spec, weights, one_sequence(module))


def test_a_shared_expert_may_have_an_activation_of_its_own() -> None:
    """Gated unit beside experts without a gate: the routed part of one module, the shared part of the other."""
    (routed, weights), (gated, theirs) = nemotron_h_block(None), qwen3_next_block()
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("shared.")}
    weights |= {name: tensor for name, tensor in theirs.items() if name.startswith("shared")}
    routed.shared_experts.register_forward_hook(
        lambda _, args, out: torch.sigmoid(gated.shared_expert_gate(args[0])) * gated.shared_expert(args[0])
    )
    spec = replace(UNGATED, shared=SharedExpert(intermediate_size=28, gate="sigmoid", act=Act()))
    assert_computes(MoELayer(HIDDEN, spec), spec, weights, one_sequence(routed))
