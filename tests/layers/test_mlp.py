"""Feed-forwards of one unit against transformers."""

from __future__ import annotations

import pytest
from layers.one_layer import HIDDEN, assert_computes, randomised

from firstlight.layers.mlp import GatedMLP
from firstlight.spec.feedforward import GLU, Act

pytest.importorskip("transformers")

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP


@pytest.mark.parametrize("bias", [False, True])
def test_a_unit_without_a_gate_is_that_of_nemotron_h(bias: bool) -> None:
    module = randomised(NemotronHMLP(NemotronHConfig(hidden_size=HIDDEN, intermediate_size=50, mlp_bias=bias)))
    spec = GLU(intermediate_size=50, act=Act(kind="relu2"), bias=bias)
    assert_computes(GatedMLP(HIDDEN, spec), spec, dict(module.named_parameters()), module)


def test_a_unit_gated_by_a_tanh_gelu_is_that_of_gemma2() -> None:
    module = randomised(Gemma2MLP(Gemma2Config(hidden_size=HIDDEN, intermediate_size=50)))
    spec = GLU(intermediate_size=50, act=Act(kind="gelu_tanh"))
    assert_computes(GatedMLP(HIDDEN, spec), spec, dict(module.named_parameters()), module)
