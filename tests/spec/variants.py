"""Layers that no tiny model has: gates on outputs, layouts of projections, units without a gate, latent experts."""

from __future__ import annotations

from dataclasses import replace

from firstlight.spec.arch import ArchSpec, HyperConnections, Layer, PreNorm
from firstlight.spec.feedforward import GLU, Act, FeedForward, Latent, MoE, Router, SharedExpert
from firstlight.spec.mixers import Decay, DeltaRule, GQAttention, Indexer, Mamba2, Mixer, MLAttention, OutputGate
from firstlight.spec.norm import Norm, Rope
from firstlight.spec.noun import NOTHING

HIDDEN = 64
NORM = Norm(kind="rms1p", eps=1e-6)
RELU2 = Act(kind="relu2")
FROM_Q = OutputGate(act="sigmoid", source="q_proj")
GATE = OutputGate(act="sigmoid")
LOW_RANK = OutputGate(act="sigmoid", rank=5)

GROUPED = GQAttention(
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    scaling=0.25,
    rope=Rope(theta=1e4, dim=4),
    qk_norm=NORM,
)
LATENT = MLAttention(
    num_attention_heads=3,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    latent_norm_eps=1e-6,
    scaling=0.3,
    q_lora_rank=20,
)
INDEXED = replace(LATENT, indexer=Indexer(num_heads=2, head_dim=8, topk=16))
DELTA = DeltaRule(
    num_k_heads=2,
    num_v_heads=6,
    head_k_dim=8,
    head_v_dim=12,
    conv_kernel_size=4,
    decay=Decay(granularity="head", form="softplus"),
    output_gate=OutputGate(act="silu"),
    norm_eps=1e-6,
)
LOW_RANK_DELTA = replace(
    DELTA, decay=Decay(granularity="channel", form="softplus", rank=7), output_gate=LOW_RANK, qkv_layout="qkv_z_b_a"
)
SPACE = Mamba2(num_heads=6, head_dim=10, state_size=8, num_groups=2, conv_kernel_size=4, norm_eps=1e-6)
SHARED = SharedExpert(intermediate_size=28)
GATED_SHARED = SharedExpert(intermediate_size=28, gate="sigmoid")
EXPERTS = MoE(
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    router=Router(score="softmax"),
    shared=GATED_SHARED,
)
UNGATED = replace(EXPERTS, act=RELU2, router=Router(score="sigmoid", bias="selection"), shared=SHARED)
UNIT = GLU(intermediate_size=50, act=RELU2)

# name -> (label, noun)
MIXERS: dict[str, tuple[str, Mixer]] = {
    "gate from q_proj": ("gated GQA", replace(GROUPED, output_gate=FROM_Q)),
    "gate from q_proj, biased": ("gated GQA", replace(GROUPED, output_gate=FROM_Q, bias=True, out_bias=True)),
    "gate on the hidden state": ("gated GQA", replace(GROUPED, output_gate=GATE)),
    "low-rank gate, window": ("gated GQA(window 7)", replace(GROUPED, output_gate=LOW_RANK, sliding_window=7)),
    "layer norm of q and k": ("GQA", replace(GROUPED, qk_norm=Norm(kind="layer", eps=1e-6))),
    "gated latent": ("gated MLA", replace(LATENT, output_gate=GATE)),
    "gated latent, indexed": ("gated sparse MLA(top 16)", replace(INDEXED, output_gate=LOW_RANK)),
    "delta rule, grouped": ("GDN", replace(DELTA, qkv_layout="qkvz_grouped")),
    "delta rule, qkv in one": ("GDN", replace(DELTA, qkv_layout="qkv_z_b_a")),
    "delta rule, separate": ("GDN", DELTA),
    "delta rule, qkv in one, low rank": ("KDA", LOW_RANK_DELTA),
    "state space": ("Mamba2", SPACE),
    "state space, no bias": ("Mamba2", replace(SPACE, conv_bias=False)),
}
FEED_FORWARDS: dict[str, tuple[str, FeedForward]] = {
    "unit without a gate": ("MLP(50)", UNIT),
    "unit without a gate, biased": ("MLP(50)", replace(UNIT, bias=True)),
    "tanh gelu": ("GLU(50)", replace(UNIT, act=Act(kind="gelu_tanh"))),
    "gated shared expert": ("MoE(8, top 3)", EXPERTS),
    "experts without a gate": ("MoE(8, top 3)", UNGATED),
    "shared expert of another activation": ("MoE(8, top 3)", replace(UNGATED, shared=replace(SHARED, act=Act()))),
    "latent experts": ("MoE(8, top 3, latent 24)", replace(UNGATED, latent=Latent(size=24))),
    "latent experts, normed": ("MoE(8, top 3, latent 24)", replace(UNGATED, latent=Latent(size=24, norm=True))),
}
VARIANTS = {**MIXERS, **FEED_FORWARDS}


def one_layer(mixer: Mixer = NOTHING, ffn: FeedForward = NOTHING, *, streams: bool = False) -> ArchSpec:
    """Return a model of one layer, with two residual streams or one."""
    hyper = HyperConnections(mult=2, sinkhorn_iters=2, eps=1e-6, norm_eps=1e-6)
    return ArchSpec(
        model_type="variant",
        vocab_size=32,
        hidden_size=HIDDEN,
        max_position_embeddings=128,
        layers=(Layer(norm=NORM, mixer=mixer, ffn=ffn),),
        norm=NORM,
        residual=hyper if streams else PreNorm(),
    )


def variant(name: str, *, streams: bool = False) -> ArchSpec:
    """Return a model of one layer that is the named noun alone."""
    if name in MIXERS:
        return one_layer(MIXERS[name][1], streams=streams)
    return one_layer(ffn=FEED_FORWARDS[name][1], streams=streams)
