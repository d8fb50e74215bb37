"""The delta rule in every storage layout of its projections, against the modules of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.one_layer import HIDDEN, assert_computes, randomised
from torch import Tensor

from firstlight.layers.recurrent import DeltaAttention
from firstlight.spec.mixers import Decay, DeltaRule, OutputGate

pytest.importorskip("transformers")

from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

# 3 value heads per key head, and no two sizes alike
SPEC = DeltaRule(
    num_k_heads=2,
    num_v_heads=6,
    head_k_dim=8,
    head_v_dim=12,
    conv_kernel_size=4,
    decay=Decay(granularity="head", form="softplus"),
    output_gate=OutputGate(act="silu"),
    norm_eps=1e-6,
    qkv_layout="qkvz_grouped",
)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}


def truth(module: Any) -> Any:
    """Return x_TH -> y_TH of a module without a cache."""
    return lambda x_TH: module(x_TH[None])[0]


def rest(module: Any) -> dict[str, Tensor]:
    """Return the weights that the layouts share."""
    return {
        "A_log": module.A_log,
        "dt_bias": module.dt_bias,
        "o_norm.weight": module.norm.weight,
        "o_proj.weight": module.out_proj.weight,
    }


def convolved(spec: DeltaRule, qkv: Tensor, taps: Tensor) -> dict[str, Tensor]:
    """Return the projection of q, k and v and its convolution, in one or cut in three as the layout says."""
    if spec.qkv_layout == "qkv_z_b_a":
        return {"qkv_proj.weight": qkv, "conv1d.weight": taps}
    widths = [spec.key_dim, spec.key_dim, spec.value_dim]
    return {
        **{f"{name}_proj.weight": rows for name, rows in zip("qkv", qkv.split(widths), strict=True)},
        **{f"{name}_conv1d.weight": rows for name, rows in zip("qkv", taps.split(widths), strict=True)},
    }


def test_the_grouped_layout_is_that_of_qwen3_next() -> None:
    module = randomised(qwen3_next.Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES), 0))
    weights = {
        **rest(module),
        "qkvz_proj.weight": module.in_proj_qkvz.weight,
        "ba_proj.weight": module.in_proj_ba.weight,
        "conv1d.weight": module.conv1d.weight.squeeze(1),
    }
    assert_computes(DeltaAttention(HIDDEN, SPEC), SPEC, weights, truth(module))


@pytest.mark.parametrize("layout", ["separate", "qkv_z_b_a"])
def test_q_k_and_v_in_one_or_separate_are_those_of_qwen3_5(layout: Any) -> None:
    module = randomised(qwen3_5_moe.Qwen3_5MoeGatedDeltaNet(Qwen3_5MoeTextConfig(**SIZES), 0))
    weights = {
        **rest(module),
        "g_proj.weight": module.in_proj_z.weight,
        "b_proj.weight": module.in_proj_b.weight,
        "f_proj.weight": module.in_proj_a.weight,
    }
    spec = replace(SPEC, qkv_layout=layout)
    weights |= convolved(spec, module.in_proj_qkv.weight, module.conv1d.weight.squeeze(1))
    assert_computes(DeltaAttention(HIDDEN, spec), spec, weights, truth(module))


@pytest.mark.parametrize("layout", ["separate", "qkv_z_b_a"])
def test_a_decay_per_channel_with_low_rank_gates_is_that_of_kimi_linear(layout: Any) -> None:
    config = KimiLinearConfig(
        hidden_size=HIDDEN, linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=4, rms_norm_eps=1e-5
    )
    module = randomised(kimi_linear.KimiLinearDeltaAttention(config, 0))
    spec = DeltaRule(
        num_k_heads=3,
        num_v_heads=3,
        head_k_dim=8,
        head_v_dim=8,
        conv_kernel_size=4,
        decay=Decay(granularity="channel", form="softplus", rank=8),
        output_gate=OutputGate(act="sigmoid", rank=8),
        norm_eps=1e-5,
        qkv_layout=layout,
    )
    given = dict(module.named_parameters())
    kept = ("b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")
    weights = {name: tensor for name, tensor in given.items() if name.split(".")[0] in kept}
    weights |= {f"{name}.weight": given[f"forget_gate.{name}.weight"] for name in ("f_a_proj", "f_b_proj")}
    weights |= {"A_log": given["forget_gate.A_log"].flatten(), "dt_bias": given["forget_gate.dt_bias"]}
    qkv = torch.cat([given[f"{name}_proj.weight"] for name in "qkv"])
    weights |= convolved(spec, qkv, module.conv1d.weight.squeeze(1))
    assert_computes(DeltaAttention(HIDDEN, spec), spec, weights, truth(module))
