"""GLM-5 (glm_moe_dsa). Differs from deepseek_v32: interleaved index RoPE, no expert groups, and layers
that reuse the selection of the last layer with a full indexer."""

from __future__ import annotations

from dataclasses import replace

from firstlight.errors import FirstlightError
from firstlight.models.deepseek_v3 import MLA_RULES, Defaults, feed_forwards, latent_attention
from firstlight.models.deepseek_v32 import INDEX_RULES, indexer
from firstlight.models.llama import decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

NAMES = DECODER.extend({**MLA_RULES, **INDEX_RULES}, extra_layers=MTP_LAYERS)


def indexer_modes(cfg: Config, num_layers: int) -> tuple[str, ...]:
    """Return "full" or "shared" per layer: `indexer_types`, else `index_topk_pattern`, else frequency and offset."""
    listed = cfg.names("indexer_types", num_layers, ("full", "shared"))
    pattern = cfg.optional("index_topk_pattern", str)
    every, offset = cfg.positive("index_topk_freq", 1), cfg.get("index_skip_topk_offset", 2)
    if listed is None and pattern is not None:
        if set(pattern) - {"F", "S"} or len(pattern) < num_layers:
            raise FirstlightError(
                f"index_topk_pattern = {pattern!r} must be {num_layers} letters F or S", where=cfg.where
            )
        listed = tuple("full" if letter == "F" else "shared" for letter in pattern[:num_layers])
    if listed is None:
        listed = tuple("full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(num_layers))
    if listed and listed[0] == "shared":
        raise FirstlightError(
            "the first layer cannot share an index selection", where=cfg.where, why="no earlier layer owns an indexer"
        )
    return listed


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a glm_moe_dsa config."""
    known = Defaults(context=202752)
    num_layers = cfg.positive("num_hidden_layers")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-5))
    cfg.names("layer_types", num_layers, ("indexed_attention",))
    base, index = latent_attention(cfg), indexer(cfg, heads=32, layout="interleave")
    mixers = {mode: replace(base, indexer=replace(index, mode=mode)) for mode in ("full", "shared")}
    modes, ffns = indexer_modes(cfg, num_layers), feed_forwards(cfg, num_layers, known)
    layers = tuple(Layer(mixer=mixers[mode], ffn=ffn, norm=norm) for mode, ffn in zip(modes, ffns, strict=True))
    return decoder(cfg, "glm_moe_dsa", layers, norm, known.context)
