"""Kimi Linear. Differs from deepseek_v3: KDA on most layers; the latent attention has no q-lora and
its decoupled key columns stay unrotated (NoPE)."""

from __future__ import annotations

from firstlight.errors import FirstlightError
from firstlight.models.deepseek_v3 import MLA_RULES, Defaults, feed_forwards, latent_attention
from firstlight.models.llama import decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.mixers import Decay, DeltaRule, Mixer, OutputGate
from firstlight.spec.names import DECODER
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

EXPERTS = "{body}layers.{i}.block_sparse_moe"
NAMES = DECODER.extend(
    {
        **MLA_RULES,
        "layers.{i}.ffn.router": f"{EXPERTS}.gate",
        "layers.{i}.ffn.router.bias": f"{EXPERTS}.gate.e_score_correction_bias",
        "layers.{i}.ffn.shared": f"{EXPERTS}.shared_experts",
        "layers.{i}.ffn.experts.{e}.gate_proj.weight": f"{EXPERTS}.experts.{{e}}.w1.weight",
        "layers.{i}.ffn.experts.{e}.up_proj.weight": f"{EXPERTS}.experts.{{e}}.w3.weight",
        "layers.{i}.ffn.experts.{e}.down_proj.weight": f"{EXPERTS}.experts.{{e}}.w2.weight",
    }
)
LINEAR_KEYS = {
    "full_attn_layers",
    "kda_layers",
    "head_dim",
    "num_heads",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "safe_gate",
}


def linear_config(cfg: Config) -> Config:
    """Return `linear_attn_config`, checked for unknown keys."""
    return cfg.section("linear_attn_config", LINEAR_KEYS)


def delta_attention(cfg: Config, *, heads: int, lower_bound: float | None, norm_eps: float) -> DeltaRule:
    """Return KDA: decay per key channel and a sigmoid output gate, both low-rank of one head's width."""
    table = linear_config(cfg)
    dim = cfg.either("linear_head_dim", table, "head_dim", 128)
    count = cfg.either("linear_num_heads", table, "num_heads", heads)
    form = "softplus" if lower_bound is None else "bounded"
    return DeltaRule(
        num_k_heads=count,
        num_v_heads=count,
        head_k_dim=dim,
        head_v_dim=dim,
        conv_kernel_size=cfg.either("linear_conv_kernel_dim", table, "short_conv_kernel_size", 4),
        decay=Decay(granularity="channel", form=form, lower_bound=lower_bound, rank=dim),  # type: ignore[arg-type]
        output_gate=OutputGate(act="sigmoid", rank=dim),
        norm_eps=norm_eps,
    )


def recurrent_layers(cfg: Config, kinds: tuple[str, ...] | None, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return which layers are KDA: 1-indexed lists, or `layer_types` read as kinds, else the usual ones.

    A list that is left out holds the layers that the other one does not name.
    """
    num_layers = len(usual)
    named = None if kinds is None else tuple(kind == "linear_attention" for kind in kinds)
    table = linear_config(cfg)
    kda, full = table.integers("kda_layers"), table.integers("full_attn_layers")
    if kda is None and full is None:
        return usual if named is None else named
    kda, full = (
        tuple(i for i in range(1, num_layers + 1) if i not in other) if one is None else one
        for one, other in ((kda, full or ()), (full, kda or ()))
    )
    if sorted(kda + full) != list(range(1, num_layers + 1)):
        raise FirstlightError(
            "kda_layers and full_attn_layers do not cover each layer once",
            where=f"{cfg.where}  linear_attn_config",
            why=f"both are 1-indexed and together name the layers 1 to {num_layers}",
        )
    listed = tuple(i + 1 in kda for i in range(num_layers))
    if named is not None and named != listed:
        raise cfg.contradiction({"layer_types": list(kinds or ()), "linear_attn_config.kda_layers": list(kda)})
    return listed


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a kimi_linear config."""
    known = Defaults(scale=2.446, dense_layers=1, context=1048576)
    num_layers = cfg.positive("num_hidden_layers")
    cfg.expect("mla_use_nope", True)
    cfg.ignore("use_grouped_topk", "rope_theta", "rope_scaling", "rope_parameters")
    eps = cfg.get("rms_norm_eps", 1e-5)
    bound = linear_config(cfg).optional("gate_lower_bound", float)
    kda: Mixer = delta_attention(cfg, heads=32, lower_bound=bound, norm_eps=eps)
    full: Mixer = latent_attention(cfg, rope=False)
    kinds = cfg.names("layer_types", num_layers, ("linear_attention", "full_attention"))
    recurrent = recurrent_layers(cfg, kinds, tuple(not (i and i % 4 == 0) for i in range(num_layers)))
    ffns, norm = feed_forwards(cfg, num_layers, known), Norm(eps=eps)
    layers = tuple(
        Layer(mixer=kda if is_kda else full, ffn=ffn, norm=norm) for is_kda, ffn in zip(recurrent, ffns, strict=True)
    )
    return decoder(cfg, "kimi_linear", layers, norm, known.context)
