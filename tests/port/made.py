"""Model folders made of a config and of tensor shapes, for drafts: nobody runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firstlight.port.draft import Draft, draft
from firstlight.weights.source import locate

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, VOCAB = 32, 4, 2, 8, 48, 64
Shapes = dict[str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    "model_type": "newmodel",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "dtype": "float32",
}
ATTENTION: Shapes = {
    "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
}
MLP: Shapes = {
    "mlp.gate_proj.weight": (WIDTH, HIDDEN),
    "mlp.up_proj.weight": (WIDTH, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, WIDTH),
}
NORMS: Shapes = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
LAYER: Shapes = {**ATTENTION, **MLP, **NORMS}
OUTSIDE: Shapes = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}


def folder(
    where: Path,
    *layers: Mapping[str, tuple[int, ...]],
    outside: Shapes = OUTSIDE,
    prefix: str = "model.",
    **changes: Any,
) -> Path:
    """Return a model folder with these layers, by default two of llama. changes: of the config, None removes a key."""
    layers = layers or (LAYER, LAYER)
    config = {**CONFIG, "num_hidden_layers": len(layers), **changes}
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    inner = {f"{prefix}layers.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in {**outside, **inner}.items()}
    save_file(tensors, where / "model.safetensors")
    return where


def drafted(where: Path, *layers: Mapping[str, tuple[int, ...]], **changes: Any) -> Draft:
    """Return the draft of such a folder."""
    return draft(locate(str(folder(where, *layers, **changes))))
