"""DeepSeek-V3.2. Differs from deepseek_v3: an index branch on every layer selects `index_topk` tokens.

Main attention rotates interleaved pairs, the index half-split ones, both on the first dimensions.
"""

from __future__ import annotations

from dataclasses import replace

from firstlight.models.deepseek_v3 import MLA_RULES, Defaults, feed_forwards, latent_attention
from firstlight.models.llama import decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.mixers import Indexer
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

INDEX_RULES = {
    "layers.{i}.mixer.indexer.q_proj": "{body}layers.{i}.self_attn.indexer.wq_b",
    "layers.{i}.mixer.indexer.k_proj": "{body}layers.{i}.self_attn.indexer.wk",
}
NAMES = DECODER.extend({**MLA_RULES, **INDEX_RULES}, extra_layers=MTP_LAYERS)


def indexer(cfg: Config, *, heads: int, layout: str, rope_dim: int = 64) -> Indexer:
    """Return the index branch; its queries come from the query latent, which must exist.

    layout: rotary layout where `indexer_rope_interleave` is absent. rope_dim: where `qk_rope_head_dim` is.
    """
    cfg.positive("q_lora_rank")
    interleave = cfg.get("indexer_rope_interleave", layout == "interleave")
    rotated = cfg.get("qk_rope_head_dim", rope_dim)
    return Indexer(
        num_heads=cfg.positive("index_n_heads", heads),
        head_dim=cfg.positive("index_head_dim", 128),
        topk=cfg.positive("index_topk", 2048),
        rope=cfg.rope(rotated, layout="interleave" if interleave else "half") if rotated else None,
    )


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a deepseek_v32 config."""
    known = Defaults(groups=8, topk_groups=4)
    num_layers = cfg.positive("num_hidden_layers")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6))
    cfg.names("layer_types", num_layers, ("indexed_attention",))
    mixer = replace(latent_attention(cfg), indexer=indexer(cfg, heads=64, layout="half"))
    layers = tuple(Layer(mixer=mixer, ffn=ffn, norm=norm) for ffn in feed_forwards(cfg, num_layers, known))
    return decoder(cfg, "deepseek_v32", layers, norm, known.context)
