"""Configurations and empty models of transformers, the oracle for sizes. Nothing here touches a file.

TINY: name -> (configuration class, model class, arguments) of small models that use every feature of their family.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from firstlight.errors import FirstlightError
from firstlight.models.declare import read_arch
from firstlight.models.registry import find_port
from firstlight.spec.arch import ArchSpec
from firstlight.spec.read import text_config

Raw = dict[str, Any]

TOKENS = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASE = {**TOKENS, "hidden_size": 64, "max_position_embeddings": 4096, "dtype": "bfloat16"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DENSE = {**BASE, **HEADS, "intermediate_size": 128, "num_hidden_layers": 4}
LATENT = {
    **BASE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 128,
}
MOE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
GROUPED = {**MOE, "n_group": 2, "topk_group": 1}
INDEX = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 6}
LINEAR = ["linear_attention"] * 3
SHARED = ["full", "full", "shared", "shared", "full"]
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
KIMI_MOE = {**{key: value for key, value in MOE.items() if key != "n_routed_experts"}, "num_local_experts": 8}
KIMI = {"layer_types": [*LINEAR, "full_attention", "linear_attention"], "q_lora_rank": None, "first_k_dense_replace": 2}
GLM = {"layer_types": [*LINEAR, "indexed_attention"] * 2, "index_kpool": 4, "hc_mult": 4, "qk_rope_head_dim": 0}
DELTA = {"linear_head_dim": 16, "linear_num_heads": 4}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 48,
}
ONE_EACH = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 12, "n_groups": 2}
LATENT_MOE = {**GROUPED, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 24, "routed_scaling_factor": 2.5}

TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DENSE),
    "llama_biased": ("LlamaConfig", "LlamaForCausalLM", {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**DENSE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DENSE),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**DENSE, **QWEN_MOE}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DENSE, **QWEN_MOE, **DELTA_NET}),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**BASE, **HEADS, **MAMBA, **LATENT_MOE, "intermediate_size": 128, "layers_block_type": ONE_EACH},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, **GROUPED, "num_hidden_layers": 4, "first_k_dense_replace": 1},
    ),
    "deepseek_v3_biased": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, **GROUPED, "num_hidden_layers": 4, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**LATENT, **GROUPED, **INDEX, "num_hidden_layers": 4, "first_k_dense_replace": 1},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**LATENT, **MOE, **INDEX, "num_hidden_layers": 5, "first_k_dense_replace": 1, "indexer_types": SHARED},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**LATENT, **KIMI_MOE, **DELTA, **KIMI, "num_hidden_layers": 5},
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextForConditionalGeneration",
        {**LATENT, **MOE, **INDEX, **DELTA, **GLM, "num_hidden_layers": 8},
    ),
}
CARDS = {
    "deepseek-v3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm-5.3-flash": ("Glm5NextConfig", "Glm5NextForConditionalGeneration"),
    "kimi-linear-48b-a3b": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
# the only causal model of this family also sees; its own tower is kept as small as it may be
VISION = {
    "hidden_size": 32,
    "depth": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
    "patch_size": 4,
    "image_size": 16,
}


def of_transformers(name: str) -> Any:
    """Return a class of transformers, or skip where the installed version lacks it."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def written(config: Any) -> dict[str, Any]:
    """Return the config.json that transformers writes."""
    raw: dict[str, Any] = json.loads(config.to_json_string())
    return raw


def build_config(config_class: str, arguments: dict[str, Any]) -> Any:
    """Return a configuration object, multimodal where the model class needs that."""
    config = of_transformers(config_class)(**json.loads(json.dumps(arguments)))
    if config_class != "Glm5NextTextConfig":
        return config
    return of_transformers("Glm5NextConfig")(text_config=config.to_dict(), vision_config=VISION)


def tiny_config(name: str) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    config_class, _, arguments = TINY[name]
    return written(build_config(config_class, arguments))


@cache
def tiny_weights(name: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the weights of a tiny model."""
    config_class, model_class, arguments = TINY[name]
    return empty_weights(model_class, build_config(config_class, arguments))


def empty_weights(model_class: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all that a text model stores: parameters, and the buffers a checkpoint carries.

    A tied head appears once. The vision tower is left out.
    """
    with torch.device("meta"):
        model = of_transformers(model_class)(config)
    stored = set(model.state_dict())
    tensors = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in stored)]
    return {name: tuple(tensor.shape) for name, tensor in tensors if ".visual." not in f".{name}"}


def declare(raw: Raw) -> ArchSpec:
    """Return the ArchSpec of a config.json."""
    return read_arch(raw, find_port(raw["model_type"]))[0]


def changed(name: str, **changes: Any) -> Raw:
    """Return the config.json of a tiny model with keys of its text tower changed."""
    return {**text_config(tiny_config(name)), **changes}


def lacking(name: str, *keys: str) -> Raw:
    """Return the config.json of a tiny model without some keys."""
    return {key: value for key, value in text_config(tiny_config(name)).items() if key not in keys}


def refusal(raw: Raw) -> FirstlightError:
    """Return the error that a config.json raises."""
    with pytest.raises(FirstlightError) as caught:
        declare(raw)
    return caught.value
