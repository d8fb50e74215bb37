"""DeepSeek-V3: latent attention with decoupled interleaved RoPE, sigmoid-routed experts in groups.

The base of every port with latent attention; they override single facts through the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.models.llama import decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.feedforward import GLU, SILU, Act, FeedForward, MoE, Router, SharedExpert
from firstlight.spec.mixers import MLAttention
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm, softmax_scale
from firstlight.spec.read import Config

# the release calls the projection after what it holds; ours after what it makes
MLA_RULES = {
    "layers.{i}.mixer.kv_a_proj": "{body}layers.{i}.self_attn.kv_a_proj_with_mqa",
    "layers.{i}.mixer.kv_a_norm": "{body}layers.{i}.self_attn.kv_a_layernorm",
    "layers.{i}.mixer.q_a_norm": "{body}layers.{i}.self_attn.q_a_layernorm",
}

NAMES = DECODER.extend(MLA_RULES, extra_layers=MTP_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of a release that its config.json may leave out."""

    experts: int = 256
    groups: int = 1
    topk_groups: int = 1
    scale: float = 2.5
    dense_layers: int = 3
    context: int = 163840


def latent_attention(
    cfg: Config, *, rope: bool = True, rope_dim: int = 64, latent_norm_eps: float = 1e-6
) -> MLAttention:
    """Return the attention of the family without an indexer. rope False: key columns stay unrotated.

    rope_dim: number of those columns where `qk_rope_head_dim` is absent.
    """
    heads = cfg.positive("num_attention_heads")
    nope, rotated = cfg.positive("qk_nope_head_dim"), cfg.get("qk_rope_head_dim", rope_dim)
    layout = "interleave" if cfg.get("rope_interleave", True) else "half"
    positions = cfg.rope(rotated, layout=layout) if rope and rotated else None
    cfg.ignore("head_dim", "num_key_value_heads", "qk_head_dim")
    q_lora_rank = cfg.optional("q_lora_rank", int)
    if q_lora_rank is None:
        # the release biases the low-rank projections only; a query without one would need half a bias
        cfg.expect("attention_bias", False)
    return MLAttention(
        num_attention_heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=cfg.positive("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=cfg.positive("v_head_dim"),
        rope=positions,
        latent_norm_eps=latent_norm_eps,
        scaling=softmax_scale(nope + rotated, positions),
        bias=cfg.get("attention_bias", False),
    )


def sparse_layers(cfg: Config, num_layers: int, dense_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: `mlp_layer_types`, else `first_k_dense_replace` and `moe_layer_freq`."""
    kinds = cfg.names("mlp_layer_types", num_layers, ("dense", "sparse"))
    first, every = cfg.get("first_k_dense_replace", dense_layers), cfg.positive("moe_layer_freq", 1)
    counted = tuple(i >= first and i % every == 0 for i in range(num_layers))
    if kinds is None:
        return counted
    listed = tuple(kind == "sparse" for kind in kinds)
    if cfg.raw.get("first_k_dense_replace") is not None and listed != counted:
        raise cfg.contradiction({"mlp_layer_types": list(kinds), "first_k_dense_replace": first})
    return listed


def feed_forwards(cfg: Config, num_layers: int, known: Defaults, act: Act = SILU) -> tuple[FeedForward, ...]:
    """Return the feed-forward of each layer: dense first, then sigmoid-routed experts with a shared one."""
    cfg.expect("hidden_act", "silu")
    cfg.expect("scoring_func", "sigmoid")
    cfg.expect("topk_method", "noaux_tc")
    cfg.expect("mlp_bias", False)
    experts, groups = cfg.positive("num_experts", known.experts), cfg.positive("n_group", known.groups)
    cfg.divides("n_group", groups, "num_experts", experts)
    topk_groups = cfg.at_most("topk_group", cfg.positive("topk_group", known.topk_groups), "n_group", groups)
    chosen, rivals = cfg.positive("num_experts_per_tok", 8), experts // groups * topk_groups
    cfg.at_most("num_experts_per_tok", chosen, "the experts of topk_group groups", rivals)
    width, shared = cfg.positive("moe_intermediate_size"), cfg.get("n_shared_experts", 1)
    router = Router(
        score="sigmoid",
        bias="selection",
        num_groups=groups,
        topk_groups=topk_groups,
        renorm=cfg.get("norm_topk_prob", True),
        scale=cfg.get("routed_scaling_factor", known.scale),
    )
    sparse = MoE(
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=width,
        router=router,
        act=act,
        shared=SharedExpert(intermediate_size=width * shared) if shared else None,
    )
    dense = GLU(intermediate_size=cfg.positive("intermediate_size"), act=act)
    return tuple(sparse if is_sparse else dense for is_sparse in sparse_layers(cfg, num_layers, known.dense_layers))


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a deepseek_v3 config."""
    known = Defaults(groups=8, topk_groups=4)
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6))
    mixer = latent_attention(cfg)
    ffns = feed_forwards(cfg, cfg.positive("num_hidden_layers"), known)
    layers = tuple(Layer(mixer=mixer, ffn=ffn, norm=norm) for ffn in ffns)
    return decoder(cfg, "deepseek_v3", layers, norm, known.context)
