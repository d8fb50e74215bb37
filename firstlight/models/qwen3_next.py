"""Qwen3-Next. Differs from qwen3_moe: gated DeltaNet on three layers of four; attention with an output gate and a
quarter of the head rotated; norms of weight 1 + w; a gated shared expert. Multi-token prediction is not run.
"""

from __future__ import annotations

from dataclasses import replace

from firstlight.models.llama import attention, decoder
from firstlight.models.qwen3_moe import Defaults, feed_forwards
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.feedforward import SharedExpert
from firstlight.spec.mixers import Decay, DeltaRule, GQAttention, Mixer, OutputGate
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

RECURRENT, FULL = "{body}layers.{i}.linear_attn", "{body}layers.{i}.self_attn"
NAMES = DECODER.extend(
    {
        "layers.{i}.mixer": (RECURRENT, FULL),
        "layers.{i}.mixer.qkvz_proj": f"{RECURRENT}.in_proj_qkvz",
        "layers.{i}.mixer.ba_proj": f"{RECURRENT}.in_proj_ba",
        "layers.{i}.mixer.o_norm": f"{RECURRENT}.norm",
        "layers.{i}.mixer.o_proj": (f"{RECURRENT}.out_proj", f"{FULL}.o_proj"),
        "layers.{i}.ffn.shared": "{body}layers.{i}.mlp.shared_expert",
        "layers.{i}.ffn.shared_gate": "{body}layers.{i}.mlp.shared_expert_gate",
    },
    ignore={r"^mtp\.": MTP_LAYERS},
)


def gated_attention(cfg: Config, norm: Norm) -> GQAttention:
    """Return attention whose query projection emits a sigmoid gate beside each head."""
    plain = attention(cfg, head_dim=256, rotated=0.25)
    return replace(plain, qk_norm=norm, output_gate=OutputGate(act="sigmoid", source="q_proj"))


def delta_net(cfg: Config, norm_eps: float) -> DeltaRule:
    """Return gated DeltaNet: one decay per value head, q, k, v and gate in groups of one key head."""
    keys, values = cfg.positive("linear_num_key_heads", 16), cfg.positive("linear_num_value_heads", 32)
    cfg.divides("linear_num_key_heads", keys, "linear_num_value_heads", values)
    return DeltaRule(
        num_k_heads=keys,
        num_v_heads=values,
        head_k_dim=cfg.positive("linear_key_head_dim", 128),
        head_v_dim=cfg.positive("linear_value_head_dim", 128),
        conv_kernel_size=cfg.positive("linear_conv_kernel_dim", 4),
        decay=Decay(granularity="head", form="softplus"),
        output_gate=OutputGate(act="silu"),
        norm_eps=norm_eps,
        qkv_layout="qkvz_grouped",
    )


def layer_kinds(cfg: Config, num_layers: int) -> tuple[str, ...]:
    """Return what each layer is: `layer_types`, else attention in every `full_attention_interval`-th layer."""
    every = cfg.positive("full_attention_interval", 4)
    counted = tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers))
    kinds = cfg.names("layer_types", num_layers, ("linear_attention", "full_attention"))
    if kinds not in (None, counted) and cfg.raw.get("full_attention_interval") is not None:
        raise cfg.contradiction({"layer_types": list(kinds or ()), "full_attention_interval": every})
    return kinds or counted


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a qwen3_next config."""
    cfg.expect("hidden_act", "silu")
    cfg.expect("use_sliding_window", False)
    known = Defaults(experts=512, chosen=10, expert_width=512, dense_width=5632, renorm=True)
    num_layers = cfg.positive("num_hidden_layers")
    norm = Norm(eps=cfg.get("rms_norm_eps", 1e-6), kind="rms1p")
    mixers: dict[str, Mixer] = {
        "linear_attention": delta_net(cfg, norm.eps),
        "full_attention": gated_attention(cfg, norm),
    }
    shared = SharedExpert(intermediate_size=cfg.positive("shared_expert_intermediate_size", 512), gate="sigmoid")
    ffns = feed_forwards(cfg, num_layers, known, shared)
    layers = tuple(
        Layer(mixer=mixers[kind], ffn=ffn, norm=norm)
        for kind, ffn in zip(layer_kinds(cfg, num_layers), ffns, strict=True)
    )
    return decoder(cfg, "qwen3_next", layers, norm, known.context)
