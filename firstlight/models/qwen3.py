"""Qwen3. Differs from llama: rms norm on q and k per head before RoPE; optional sliding window."""

from __future__ import annotations

from firstlight.models.llama import attention, decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.feedforward import GLU
from firstlight.spec.names import DECODER
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

NAMES = DECODER


def windows(cfg: Config, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None where it sees everything."""
    size = cfg.optional("sliding_window", int)
    first = cfg.get("max_window_layers", 28)
    slides = cfg.get("use_sliding_window", False) and size is not None
    kinds = cfg.names("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        return tuple(size if slides and i >= first else None for i in range(num_layers))
    if "sliding_attention" in kinds and not slides:
        raise cfg.contradiction({"layer_types": list(kinds), "use_sliding_window": slides, "sliding_window": size})
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a qwen3 config."""
    cfg.expect("hidden_act", "silu")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6))
    ffn = GLU(intermediate_size=cfg.positive("intermediate_size"))
    layers = tuple(
        Layer(mixer=attention(cfg, qk_norm=True, head_dim=128, window=window), ffn=ffn, norm=norm)
        for window in windows(cfg, cfg.positive("num_hidden_layers"))
    )
    return decoder(cfg, "qwen3", layers, norm, 32768)
