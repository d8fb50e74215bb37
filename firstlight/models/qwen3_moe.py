"""Qwen3-MoE. Differs from qwen3: softmax-routed experts, no shared expert, one window for all layers."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.models.llama import attention, decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.feedforward import GLU, FeedForward, MoE, Router, SharedExpert
from firstlight.spec.names import DECODER
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

NAMES = DECODER


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of a release that its config.json may leave out."""

    experts: int = 128
    chosen: int = 8
    expert_width: int = 768
    dense_width: int = 6144
    renorm: bool = False
    context: int = 32768


def feed_forwards(
    cfg: Config, num_layers: int, known: Defaults, shared: SharedExpert | None = None
) -> tuple[FeedForward, ...]:
    """Return the feed-forward of each layer: experts every `decoder_sparse_step`-th layer, unless listed dense."""
    dense_layers = cfg.integers("mlp_only_layers") or ()
    for layer in dense_layers:
        cfg.at_most("mlp_only_layers", layer, "the last layer", num_layers - 1)
    step = cfg.positive("decoder_sparse_step", 1)
    count = cfg.positive("num_experts", known.experts)
    experts = MoE(
        num_experts=count,
        num_experts_per_tok=cfg.at_most(
            "num_experts_per_tok", cfg.positive("num_experts_per_tok", known.chosen), "num_experts", count
        ),
        moe_intermediate_size=cfg.positive("moe_intermediate_size", known.expert_width),
        router=Router(score="softmax", renorm=cfg.get("norm_topk_prob", known.renorm)),
        shared=shared,
    )
    dense = GLU(intermediate_size=cfg.positive("intermediate_size", known.dense_width))
    return tuple(experts if i not in dense_layers and (i + 1) % step == 0 else dense for i in range(num_layers))


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a qwen3_moe config."""
    cfg.expect("hidden_act", "silu")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6))
    size = cfg.optional("sliding_window", int)
    window = size if cfg.get("use_sliding_window", False) else None
    cfg.ignore("max_window_layers")
    mixer = attention(cfg, qk_norm=True, window=window)
    known = Defaults()
    ffns = feed_forwards(cfg, cfg.positive("num_hidden_layers"), known)
    layers = tuple(Layer(mixer=mixer, ffn=ffn, norm=norm) for ffn in ffns)
    return decoder(cfg, "qwen3_moe", layers, norm, known.context)
