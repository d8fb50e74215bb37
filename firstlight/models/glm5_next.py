"""GLM-5.3-Flash (glm5_next), text tower: KDA and indexed latent attention 3:1 on hyper-connections.

Differs from kimi_linear: bounded decay; the latent attention has q-lora, no rotary columns and an
index over pooled keys; clamped SwiGLU; four residual streams. Vision tensors are skipped.
"""

from __future__ import annotations

from dataclasses import replace

from firstlight.models.deepseek_v3 import MLA_RULES, Defaults, feed_forwards, latent_attention
from firstlight.models.deepseek_v32 import INDEX_RULES, indexer
from firstlight.models.glm_moe_dsa import indexer_modes
from firstlight.models.kimi_linear import delta_attention, linear_config, recurrent_layers
from firstlight.models.llama import decoder
from firstlight.spec.arch import ArchSpec, HyperConnections, Layer
from firstlight.spec.feedforward import Act
from firstlight.spec.mixers import KeyPool, Mixer, MLAttention
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

INDEXER = "{body}layers.{i}.self_attn.indexer"
NAMES = DECODER.extend(
    {
        **MLA_RULES,
        **INDEX_RULES,
        "layers.{i}.mixer.indexer.gate_proj.weight": f"{INDEXER}.index_kpool_compress_gate",
        "layers.{i}.mixer.indexer.position_bias": f"{INDEXER}.index_kpool_compress_ape",
        "layers.{i}.mixer_residual.fn": "{body}layers.{i}.hc_attn_fn",
        "layers.{i}.mixer_residual.base": "{body}layers.{i}.hc_attn_base",
        "layers.{i}.mixer_residual.scale": "{body}layers.{i}.hc_attn_scale",
        "layers.{i}.ffn_residual.fn": "{body}layers.{i}.hc_ffn_fn",
        "layers.{i}.ffn_residual.base": "{body}layers.{i}.hc_ffn_base",
        "layers.{i}.ffn_residual.scale": "{body}layers.{i}.hc_ffn_scale",
    },
    prefixes=("model.language_model.", "model."),
    ignore={
        r"(^|\.)visual\.": "vision tower, text only",
        r"\.layers\.\d+\.shared_head\.": "multi-token prediction head, not run",
    },
    extra_layers=MTP_LAYERS,
)


def lower_bound(cfg: Config) -> float | None:
    """Return the bound of the log decay, None for the softplus form: a null `linear_lower_bound` beside no
    `linear_attn_config`, or beside one whose `safe_gate` is off."""
    table = linear_config(cfg)
    null = "linear_lower_bound" in cfg.raw and cfg.raw["linear_lower_bound"] is None
    safe = cfg.raw.get("linear_attn_config") is not None and table.get("safe_gate", True)
    outer = cfg.optional("linear_lower_bound", float)
    inner = table.optional("gate_lower_bound", float)
    if inner is not None and outer is not None and inner != outer:
        raise cfg.contradiction({"linear_lower_bound": outer, "linear_attn_config.gate_lower_bound": inner})
    if inner is not None or outer is not None:
        return outer if inner is None else inner
    return None if null and not safe else -5.0


def indexed_attention(cfg: Config, mode: str, norm_eps: float) -> MLAttention:
    """Return latent attention, without rotary columns, over the tokens that the pooled index selects."""
    cfg.expect("qk_rope_head_dim", 0)
    pool = KeyPool(size=cfg.positive("index_kpool", 16), always_tail=cfg.get("index_kpool_always_select_tail", True))
    index = indexer(cfg, heads=32, layout="half", rope_dim=0)
    cfg.divides("index_kpool", pool.size, "index_topk", index.topk)
    index = replace(index, pool=pool, mode=mode)  # type: ignore[arg-type]
    return replace(latent_attention(cfg, rope_dim=0, latent_norm_eps=norm_eps), indexer=index)


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a glm5_next config."""
    known = Defaults(experts=288, context=1048576)
    num_layers = cfg.positive("num_hidden_layers")
    eps = cfg.get("rms_norm_eps", 1e-5)
    kinds = cfg.names("layer_types", num_layers, ("linear_attention", "indexed_attention", "full_attention"))
    recurrent = recurrent_layers(cfg, kinds, tuple(i % 4 != 3 for i in range(num_layers)))
    kda: Mixer = delta_attention(cfg, heads=64, lower_bound=lower_bound(cfg), norm_eps=eps)
    modes = indexer_modes(cfg, num_layers)
    mixers = [
        kda if is_kda else indexed_attention(cfg, mode, eps) for is_kda, mode in zip(recurrent, modes, strict=True)
    ]
    act, norm = Act(kind="clamp", limit=cfg.get("swiglu_limit", 10.0)), Norm(eps=eps)
    ffns = feed_forwards(cfg, num_layers, known, act)
    layers = tuple(Layer(mixer=mixer, ffn=ffn, norm=norm) for mixer, ffn in zip(mixers, ffns, strict=True))
    streams = HyperConnections(
        mult=cfg.positive("hc_mult", 4),
        sinkhorn_iters=cfg.positive("hc_sinkhorn_iters", 20),
        eps=cfg.get("hc_eps", 1e-6),
        norm_eps=eps,
    )
    return replace(decoder(cfg, "glm5_next", layers, norm, known.context), residual=streams)
