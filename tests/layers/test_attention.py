"""Attention with gated outputs, partial rotation and norms on q and k, against the modules of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.one_layer import HIDDEN, Truth, assert_computes, randomised
from torch import Tensor, nn

from firstlight.layers.attention import GroupedQueryAttention
from firstlight.layers.latent_attention import LatentAttention
from firstlight.spec.mixers import GQAttention, MLAttention, OutputGate
from firstlight.spec.norm import Norm, Rope

pytest.importorskip("transformers")

from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

# half of each head is rotated
GROUPED = GQAttention(
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    scaling=0.25,
    rope=Rope(theta=50000.0, dim=8),
    qk_norm=Norm(kind="rms1p", eps=1e-6),
)
LATENT = MLAttention(
    num_attention_heads=3,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    latent_norm_eps=1e-6,
    scaling=12**-0.5,
)


def causal_pass(module: Any, rotary: Any) -> Truth:
    """Return one uncached pass of an attention of transformers over one sequence. rotary: None where nothing turns."""

    def truth(x_TH: Tensor) -> Tensor:
        mask = torch.full((len(x_TH), len(x_TH)), float("-inf")).triu(1)[None, None]
        angles = () if rotary is None else (rotary(x_TH[None], torch.arange(len(x_TH))[None]),)
        out: Tensor = module(x_TH[None], *angles, attention_mask=mask)[0][0]
        return out

    return truth


def gated(module: Any, projections: dict[str, Tensor], act: str, truth: Truth) -> Truth:
    """Return the truth where what enters o_proj is multiplied by act(projections of x)."""
    seen: list[Tensor] = []

    def multiply(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        logits = seen[-1]
        for weight in projections.values():
            logits = logits @ weight.T
        return args[0] * torch.sigmoid(logits) * (logits if act == "silu" else 1)

    module.o_proj.register_forward_pre_hook(multiply)

    def run(x_TH: Tensor) -> Tensor:
        seen.append(x_TH)
        return truth(x_TH)

    return run


def gate_weights(rank: int | None, width: int) -> dict[str, Tensor]:
    """Return the projections of a gate on the hidden state."""
    gen = torch.Generator().manual_seed(8)
    if rank is None:
        return {"g_proj.weight": torch.randn(width, HIDDEN, generator=gen) / 8}
    shapes = {"g_a_proj.weight": (rank, HIDDEN), "g_b_proj.weight": (width, rank)}
    return {name: torch.randn(*shape, generator=gen) / shape[1] ** 0.5 for name, shape in shapes.items()}


@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_from_the_query_projection_is_that_of_qwen3_next(bias: bool) -> None:
    config = Qwen3NextConfig(
        hidden_size=HIDDEN, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    config._attn_implementation = "eager"
    module, rotary = randomised(qwen3_next.Qwen3NextAttention(config, 0)), qwen3_next.Qwen3NextRotaryEmbedding(config)
    spec = replace(GROUPED, output_gate=OutputGate(act="sigmoid", source="q_proj"), bias=bias, out_bias=bias)
    assert_computes(
        GroupedQueryAttention(HIDDEN, spec), spec, dict(module.named_parameters()), causal_pass(module, rotary)
    )


def qwen3_attention() -> tuple[Any, Any]:
    """Return the module without a gate, and its rotation."""
    config = Qwen3Config(
        hidden_size=HIDDEN, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    return randomised(qwen3.Qwen3Attention(config, 0)), qwen3.Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
@pytest.mark.parametrize("rank", [None, 5])
def test_a_gate_on_the_hidden_state_multiplies_the_heads_of_qwen3(rank: int | None, act: Any) -> None:
    module, rotary = qwen3_attention()
    gate = OutputGate(act=act, rank=rank)
    spec = replace(GROUPED, rope=Rope(theta=50000.0, dim=16), qk_norm=Norm(eps=1e-6), output_gate=gate)
    weights = gate_weights(rank, 6 * 16)
    truth = gated(module, weights, act, causal_pass(module, rotary))
    assert_computes(GroupedQueryAttention(HIDDEN, spec), spec, {**dict(module.named_parameters()), **weights}, truth)


def test_the_norm_of_q_and_k_may_be_a_layer_norm() -> None:
    module, rotary = qwen3_attention()
    module.q_norm, module.k_norm = (randomised(nn.LayerNorm(16, eps=1e-3), seed) for seed in (1, 2))
    spec = replace(GROUPED, rope=Rope(theta=50000.0, dim=16), qk_norm=Norm(kind="layer", eps=1e-3))
    weights = dict(module.named_parameters())
    assert_computes(GroupedQueryAttention(HIDDEN, spec), spec, weights, causal_pass(module, rotary))


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_a_gated_latent_attention_is_that_of_kimi_linear_times_the_gate(
    rank: int | None, act: Any, q_lora_rank: int | None
) -> None:
    config = KimiLinearConfig(
        hidden_size=HIDDEN, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=24, q_lora_rank=q_lora_rank,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = randomised(kimi_linear.KimiLinearAttention(config, 0))
    spec = replace(LATENT, q_lora_rank=q_lora_rank, output_gate=OutputGate(act=act, rank=rank))
    spelt = {"kv_a_proj_with_mqa": "kv_a_proj", "kv_a_layernorm": "kv_a_norm", "q_a_layernorm": "q_a_norm"}
    weights = gate_weights(rank, 3 * 10)
    for name, tensor in module.named_parameters():
        owner, attribute = name.split(".")
        weights[f"{spelt.get(owner, owner)}.{attribute}"] = tensor
    projections = {name: tensor for name, tensor in weights.items() if name.startswith("g_")}
    truth = gated(module, projections, act, causal_pass(module, None))
    assert_computes(LatentAttention(HIDDEN, spec), spec, weights, truth)
