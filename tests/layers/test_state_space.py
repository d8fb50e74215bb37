"""State space (Mamba-2) against the module of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers.one_layer import HIDDEN, assert_computes, randomised
from torch import Tensor

from firstlight.layers.state_space import StateSpace
from firstlight.spec.mixers import Mamba2

pytest.importorskip("transformers")

from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

# 3 heads per group, and no two sizes alike
SPEC = Mamba2(num_heads=6, head_dim=10, state_size=8, num_groups=2, conv_kernel_size=4, norm_eps=1e-5)


def reference(spec: Mamba2, *, time_step_min: float = 0.0) -> tuple[Any, dict[str, Tensor]]:
    """Return a mixer of transformers with random weights, and its weights by our names."""
    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        mamba_num_heads=spec.num_heads,
        mamba_head_dim=spec.head_dim,
        ssm_state_size=spec.state_size,
        n_groups=spec.num_groups,
        conv_kernel=spec.conv_kernel_size,
        use_conv_bias=spec.conv_bias,
        layer_norm_epsilon=spec.norm_eps,
        time_step_min=time_step_min,
        chunk_size=16,
    )
    module = randomised(NemotronHMamba2Mixer(config, 0))
    given = dict(module.named_parameters())
    ours = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}
    weights = {ours.get(name, name): tensor for name, tensor in given.items()}
    return module, {**weights, "conv1d.weight": module.conv1d.weight.squeeze(1)}


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_groups": 1}, {"num_groups": 6}, {"conv_bias": False}, {"conv_kernel_size": 2}],
    ids=["two groups", "one group", "a group per head", "no bias", "narrow"],
)
def test_the_layer_is_the_mixer_of_nemotron_h(changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    module, weights = reference(spec)
    assert_computes(StateSpace(HIDDEN, spec), spec, weights, lambda x_TH: module(x_TH[None])[0])


def test_the_floor_of_the_time_step_holds_in_every_step() -> None:
    # a pass without a cache clamps; a third of the steps lie below
    spec = replace(SPEC, dt_min=0.4)
    module, weights = reference(spec, time_step_min=0.4)
    free, _ = reference(SPEC)
    x_TH = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(4))
    assert (module(x_TH[None]) - free(x_TH[None])).abs().max() > 0.1
    assert_computes(StateSpace(HIDDEN, spec), spec, weights, lambda x_TH: module(x_TH[None])[0])
