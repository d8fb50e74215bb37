"""Llama: grouped-query attention with half RoPE, pre-norm, SwiGLU. The base of the qwen3 ports."""

from __future__ import annotations

from firstlight.spec.arch import ArchSpec, Layer, PreNorm
from firstlight.spec.feedforward import GLU
from firstlight.spec.mixers import GQAttention
from firstlight.spec.names import DECODER
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

NAMES = DECODER


def attention(
    cfg: Config, *, qk_norm: bool = False, head_dim: int | None = None, window: int | None = None, rotated: float = 1.0
) -> GQAttention:
    """Return the attention of the llama family. head_dim None: hidden_size / num_attention_heads.

    rotated: part of the head, where the config has no `partial_rotary_factor`.
    """
    hidden, heads = cfg.positive("hidden_size"), cfg.positive("num_attention_heads")
    kv_heads = cfg.positive("num_key_value_heads", heads)
    cfg.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if head_dim is None and cfg.optional("head_dim", int) is None:
        cfg.divides("num_attention_heads", heads, "hidden_size", hidden)
    dim = cfg.positive("head_dim", head_dim or hidden // heads)
    bias = cfg.get("attention_bias", False)
    return GQAttention(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        scaling=dim**-0.5,
        rope=cfg.rope(dim, layout="half", partial=rotated),
        qk_norm=Norm(eps=cfg.get("rms_norm_eps", 1e-6)) if qk_norm else None,
        sliding_window=window,
        bias=bias,
        out_bias=bias,
    )


def decoder(cfg: Config, model_type: str, layers: tuple[Layer, ...], norm: Norm, context: int) -> ArchSpec:
    """Return a pre-norm decoder of the given layers. context: positions where the config names none."""
    return ArchSpec(
        model_type=model_type,
        vocab_size=cfg.positive("vocab_size"),
        hidden_size=cfg.positive("hidden_size"),
        max_position_embeddings=cfg.positive("max_position_embeddings", context),
        layers=layers,
        norm=norm,
        residual=PreNorm(),
        tie_word_embeddings=cfg.get("tie_word_embeddings", False),
        mtp_layers=cfg.get("num_nextn_predict_layers", 0),
        dtype=cfg.get("dtype", "float32"),
    )


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a llama config."""
    cfg.expect("hidden_act", "silu")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6))
    ffn = GLU(intermediate_size=cfg.positive("intermediate_size"), bias=cfg.get("mlp_bias", False))
    layer = Layer(mixer=attention(cfg), ffn=ffn, norm=norm)
    return decoder(cfg, "llama", (layer,) * cfg.positive("num_hidden_layers"), norm, 2048)
