"""Nemotron-H: layers of one operation each - Mamba-2, attention without positions, an MLP, or experts.

MLP and experts have a squared ReLU and no gate; the routed experts may work in a latent width beside a shared one of
the model's. The time step has a floor in every pass; transformers 5.23 has it in a prefill, not in a decode step.
"""

from __future__ import annotations

import math
from dataclasses import replace

from firstlight.models.llama import attention, decoder
from firstlight.spec.arch import ArchSpec, Layer
from firstlight.spec.feedforward import GLU, Act, Latent, MoE, Router, SharedExpert
from firstlight.spec.mixers import Mamba2
from firstlight.spec.names import DECODER, MTP_LAYERS
from firstlight.spec.norm import Norm
from firstlight.spec.read import Config

BLOCK = "{body}layers.{i}.mixer"
NAMES = DECODER.extend(
    {
        "embed": "{body}embeddings",
        "norm": "{body}norm_f",
        "layers.{i}.mixer_norm": "{body}layers.{i}.norm",
        "layers.{i}.ffn_norm": "{body}layers.{i}.norm",
        "layers.{i}.mixer": BLOCK,
        "layers.{i}.mixer.o_norm": f"{BLOCK}.norm",
        "layers.{i}.mixer.o_proj": (f"{BLOCK}.out_proj", f"{BLOCK}.o_proj"),
        "layers.{i}.ffn": BLOCK,
        "layers.{i}.ffn.router": f"{BLOCK}.gate",
        "layers.{i}.ffn.router.bias": f"{BLOCK}.gate.e_score_correction_bias",
        "layers.{i}.ffn.shared": f"{BLOCK}.shared_experts",
        "layers.{i}.ffn.latent_down": f"{BLOCK}.fc1_latent_proj",
        "layers.{i}.ffn.latent_up": f"{BLOCK}.fc2_latent_proj",
        "layers.{i}.ffn.experts.{e}.up_proj.weight": f"{BLOCK}.experts.{{e}}.up_proj.weight",
        "layers.{i}.ffn.experts.{e}.down_proj.weight": f"{BLOCK}.experts.{{e}}.down_proj.weight",
    },
    prefixes=("backbone.",),
    ignore={r"^mtp\.": MTP_LAYERS},
)
# the words of `layers_block_type`, new and old, as letters of `hybrid_override_pattern`
LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
RELU2 = Act(kind="relu2")


def pattern(cfg: Config) -> str:
    """Return a letter per layer: M state space, * attention, - MLP, E experts."""
    listed = cfg.raw.get("layers_block_type")
    words = cfg.names("layers_block_type", len(listed) if isinstance(listed, list) else 0, LETTERS)
    written = cfg.get("hybrid_override_pattern", "")
    spelled = "".join(LETTERS[word] for word in words or ())
    if written and spelled and written != spelled:
        raise cfg.contradiction({"layers_block_type": listed, "hybrid_override_pattern": written})
    letters = spelled or written or "ME*-"
    if unknown := set(letters) - set(LETTERS.values()):
        raise cfg.wrong(f"hybrid_override_pattern has the letter {min(unknown)!r}; known are M, *, - and E")
    if (count := cfg.positive("num_hidden_layers", len(letters))) != len(letters):
        raise cfg.contradiction({"num_hidden_layers": count, "layers of the pattern": len(letters)})
    return letters


def state_space(cfg: Config, norm_eps: float) -> Mamba2:
    """Return the Mamba-2 of every M."""
    cfg.expect("mamba_hidden_act", "silu")
    cfg.expect("use_bias", False)
    cfg.expect("mamba_proj_bias", False)
    # a range that bounds nothing, as json and as transformers write infinity
    cfg.expect("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    # how training began, how kernels cut the sequence, and a format that the precision policy chooses
    cfg.ignore("time_step_max", "time_step_floor", "chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype")
    heads, groups = cfg.positive("mamba_num_heads", 128), cfg.positive("n_groups", 8)
    cfg.divides("n_groups", groups, "mamba_num_heads", heads)
    return Mamba2(
        num_heads=heads,
        head_dim=cfg.positive("mamba_head_dim", 64),
        state_size=cfg.positive("ssm_state_size", 128),
        num_groups=groups,
        conv_kernel_size=cfg.positive("conv_kernel", 4),
        conv_bias=cfg.get("use_conv_bias", True),
        norm_eps=norm_eps,
        dt_min=cfg.get("time_step_min", 0.001),
    )


def experts(cfg: Config) -> MoE:
    """Return the experts of every E: sigmoid-routed in groups, one shared."""
    cfg.expect("n_shared_experts", 1)
    cfg.ignore("moe_shared_expert_overlap")
    count, groups = cfg.positive("num_experts", 8), cfg.positive("n_group", 1)
    cfg.divides("n_group", groups, "num_experts", count)
    topk_groups = cfg.at_most("topk_group", cfg.positive("topk_group", 1), "n_group", groups)
    chosen, rivals = cfg.positive("num_experts_per_tok", 2), count // groups * topk_groups
    latent = cfg.optional("moe_latent_size", int)
    return MoE(
        num_experts=count,
        num_experts_per_tok=cfg.at_most("num_experts_per_tok", chosen, "the experts of topk_group groups", rivals),
        moe_intermediate_size=cfg.positive("moe_intermediate_size", 7688),
        router=Router(
            score="sigmoid",
            bias="selection",
            num_groups=groups,
            topk_groups=topk_groups,
            renorm=cfg.get("norm_topk_prob", True),
            scale=cfg.get("routed_scaling_factor", 1.0),
        ),
        act=RELU2,
        shared=SharedExpert(intermediate_size=cfg.positive("moe_shared_expert_intermediate_size", 7688)),
        latent=None if latent is None else Latent(size=latent),
    )


def arch(cfg: Config) -> ArchSpec:
    """Return the declaration of a nemotron_h config."""
    for key in ("attention_bias", "mlp_bias", "residual_in_fp32"):
        cfg.expect(key, False)
    cfg.expect("mlp_hidden_act", "relu2")
    cfg.expect("sliding_window", None)
    norm = Norm(eps=cfg.get("layer_norm_epsilon", 1e-5))
    # repeats of the same fact
    cfg.expect("norm_eps", norm.eps)
    cfg.expect("rms_norm_eps", norm.eps)
    cfg.ignore("rescale_prenorm_residual", "num_logits_to_keep", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    dense = GLU(intermediate_size=cfg.positive("intermediate_size", 21504), act=RELU2)
    kinds = {
        "M": Layer(norm=norm, mixer=state_space(cfg, norm.eps)),
        # the release has rotary keys and rotates nothing
        "*": Layer(norm=norm, mixer=replace(attention(cfg, head_dim=128), rope=None)),
        "-": Layer(norm=norm, ffn=dense),
        "E": Layer(norm=norm, ffn=experts(cfg)),
    }
    return decoder(cfg, "nemotron_h", tuple(kinds[letter] for letter in pattern(cfg)), norm, 4096)
