"""Rotary frequencies against transformers, for every scaling rule."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from firstlight.layers.rope import rotary_frequencies
from firstlight.spec.read import Config

TABLES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn unequal mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn given factor": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("rotated", [{}, {"partial_rotary_factor": 0.5}], ids=["whole", "half of the head"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_equal_transformers(name: str, spelling: str, rotated: dict[str, float]) -> None:
    table = {"rope_theta": 50000.0, **TABLES[name], **rotated}
    theirs = LlamaConfig(head_dim=64, rope_parameters=dict(table), max_position_embeddings=131072)
    expected, factor = ROPE_INIT_FUNCTIONS[str(table["rope_type"])](theirs, device="cpu")
    raw: dict[str, object] = {"max_position_embeddings": 131072}
    if spelling == "rope_parameters":
        raw["rope_parameters"] = table
    else:
        raw |= {"rope_theta": 50000.0, **rotated, "rope_scaling": {"type": table["rope_type"], **TABLES[name]}}
    found, found_factor = rotary_frequencies(Config(raw).rope(64, layout="half"))
    assert len(found) == (16 if rotated else 32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor)


def test_plain_frequencies_equal_the_definition() -> None:
    found, factor = rotary_frequencies(Config({"rope_theta": 10000}).rope(8, layout="half"))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)
    assert factor == 1.0
