"""What names in a config.json or a checkpoint betray: one clue per feature, none per model.

A fact is a key ("kv_lora_rank"), a key in a nested object ("rope_scaling.factor"), or either with a
word that is its value ("layer_types=linear_attention"). `facts` must match a fact as a whole,
`tensors` must occur in a tensor name whose numbers were replaced by {n}.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """part: of the architecture. operators: what it needs.

    unless: keys beside which the same fact says nothing new.
    """

    part: str
    meaning: str
    facts: str = ""
    tensors: str = ""
    operators: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


MIXERS = (
    Clue(
        part="mixer",
        meaning="projections of query, key, value and output",
        tensors=r"self_attn\.(q|k|v|o|qkv)_proj\.weight$",
        operators=("linear",),
    ),
    Clue(
        part="mixer",
        meaning="grouped-query attention",
        facts="num_key_value_heads|layer_types=full_attention",
        operators=("attention",),
        unless=("kv_lora_rank",),
    ),
    Clue(
        part="mixer",
        meaning="latent attention (MLA)",
        facts="kv_lora_rank|q_lora_rank|qk_(nope|rope)_head_dim|v_head_dim|qk_head_dim",
        tensors=r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj|kv_a_layernorm|q_a_layernorm)\.",
        operators=("mla",),
    ),
    Clue(
        part="mixer",
        meaning="gated delta rule, decay per channel (KDA)",
        facts=r"linear_attn_config(\.(head_dim|num_heads|short_conv_kernel_size|kda_layers|full_attn_layers|gate_lower_bound|safe_gate))?"
        "|linear_(num_heads|head_dim|conv_kernel_dim|lower_bound)|layer_types=linear_attention",
        tensors=r"self_attn\.(f_a_proj|f_b_proj|g_a_proj|g_b_proj|b_proj|[qkv]_conv1d|o_norm)\.",
        operators=("short_conv", "decay_gate", "delta_rule", "gated_rms_norm"),
        unless=("linear_num_value_heads", "mamba_num_heads", "ssm_state_size"),
    ),
    Clue(
        part="mixer",
        meaning="gated delta rule, decay per head (gated DeltaNet)",
        facts="linear_(num_key_heads|num_value_heads|key_head_dim|value_head_dim)|full_attention_interval",
        tensors=r"linear_attn\.",
        operators=("short_conv", "decay_gate", "delta_rule", "gated_rms_norm"),
    ),
    Clue(
        part="mixer",
        meaning="q, k, v, z grouped per key head",
        tensors=r"in_proj_qkvz\.",
        operators=("linear",),
    ),
    Clue(part="mixer", meaning="q, k, v beside z, b, a", tensors=r"in_proj_qkv\.", operators=("linear",)),
    Clue(part="mixer", meaning="decay of a recurrence", tensors=r"\.(A_log|dt_bias)$", operators=("decay_gate",)),
    Clue(
        part="mixer",
        meaning="state-space recurrence (Mamba-2)",
        facts=r"mamba_\w+(=\w+)?|ssm_\w+|use_mamba_kernels|time_step_\w+|(layer_types|layers_block_type)=mamba\w*",
        tensors=r"\.mamba\.|mixer\.(D|dt_bias|A_log|in_proj|conv1d)\b",
        operators=("short_conv", "mamba2", "gated_rms_norm"),
    ),
    Clue(
        part="mixer",
        meaning="groups and short convolution of a recurrence",
        facts="n_groups|conv_kernel|use_conv_bias|expand",
        operators=("short_conv",),
    ),
    Clue(
        part="mixer",
        meaning="layers of one operation",
        facts=r"hybrid_override_pattern=[-M*E]+|layers_block_type=(linear_attention|full_attention|attention|mlp|moe)",
    ),
    Clue(
        part="mixer",
        meaning="gated short convolution",
        facts="conv_L_cache|layer_types=conv",
        tensors=r"\.conv\.(in_proj|conv|out_proj)\.",
        operators=("short_conv",),
    ),
    Clue(
        part="mixer",
        meaning="sliding window",
        facts="sliding_window|use_sliding_window|max_window_layers|sliding_window_pattern|layer_types=sliding_attention",
        operators=("attention",),
    ),
    Clue(
        part="mixer",
        meaning="attention within chunks",
        facts="attention_chunk_size|layer_types=chunked_attention",
        operators=("chunked_attention",),
    ),
    Clue(
        part="mixer",
        meaning="compressed keys and values",
        facts=r"compress_\w+(\.\w+)?|layer_types=\w*compressed\w*",
        tensors=r"\bcompressor\.",
        operators=("compressed_attention",),
    ),
    Clue(
        part="mixer",
        meaning="output projection in groups",
        facts="o_groups|o_lora_rank",
        tensors=r"\.(wo_[ab]|o_[ab]_proj)\.",
        operators=("grouped_output",),
    ),
    Clue(
        part="mixer",
        meaning="learned sinks in the softmax",
        facts=r"(use_)?(attention_|attn_)?sinks?|\w*sink_bias",
        tensors=r"\.(sinks|attn_sink|attention_sink_bias)$",
        operators=("attention",),
    ),
    Clue(
        part="mixer",
        meaning="gate on the output of attention",
        facts=r"(attn|attention|mla_use|use)_output_gate",
        tensors=r"self_attn\.g_proj\.",
        operators=("output_gate",),
    ),
    Clue(part="mixer", meaning="soft cap on logits", facts=r"\w*(logit_softcapping|softcap)", operators=("softcap",)),
    Clue(part="mixer", meaning="linear position bias (ALiBi)", facts=r"(use_)?alibi(\w+)?", operators=("alibi",)),
    Clue(
        part="mixer",
        meaning="biases of projections",
        facts="attention_bias|mlp_bias|qkv_bias",
        tensors=r"(q|k|v|o|qkv|gate|up|down)_proj\.bias$",
        operators=("linear",),
    ),
)

INDEX = (
    Clue(
        part="index",
        meaning="index branch that selects tokens",
        facts="index_(topk|n_heads|head_dim)|indexer_rope_interleave|layer_types=indexed_attention",
        tensors=r"\bindexer\.",
        operators=("index_topk", "sparse_mla"),
    ),
    Clue(
        part="index",
        meaning="index keys pooled over tokens",
        facts=r"index_kpool(_\w+)?",
        tensors=r"\bindex_kpool_",
        operators=("index_pool",),
    ),
    Clue(
        part="index",
        meaning="selection shared between layers",
        facts="indexer_types(=full|=shared)?|index_topk_pattern(=[FS]+)?|index_topk_freq|index_skip_topk_offset",
        operators=("index_topk",),
    ),
)

FEED_FORWARDS = (
    Clue(
        part="feed-forward",
        meaning="gated linear unit",
        facts="hidden_act=silu",
        tensors=r"mlp\.(gate_proj|up_proj|down_proj|gate_up_proj)\.weight$",
        operators=("glu",),
    ),
    Clue(part="feed-forward", meaning="clamped gated unit", facts="swiglu_limit", operators=("glu",)),
    Clue(
        part="feed-forward",
        meaning="SiTU activation",
        facts=r"activation_situ_\w+|hidden_act=situ",
        operators=("situ",),
    ),
    Clue(
        part="feed-forward",
        meaning="GELU by its tanh approximation",
        facts="hidden_(act|activation)=gelu_pytorch_tanh",
        operators=("glu",),
    ),
    Clue(
        part="feed-forward",
        meaning="GELU activation",
        facts=r"hidden_(act|activation)=gelu(?!_pytorch_tanh$)\w*",
        operators=("gelu",),
    ),
    Clue(
        part="feed-forward",
        meaning="squared ReLU, no gate",
        facts=r"(mlp_)?hidden_act=relu2",
        operators=("activation",),
    ),
    Clue(
        part="MoE",
        meaning="mixture of experts",
        facts="num_experts|n_routed_experts|num_local_experts|num_experts_per_tok(en)?|moe_intermediate_size|first_k_dense_replace"
        "|moe_layer_freq|decoder_sparse_step|mlp_only_layers|mlp_layer_types(=dense|=sparse)?|layers_block_type=moe",
        tensors=r"\bexperts\.|block_sparse_moe\.|mlp\.gate\.weight$",
        operators=("router", "experts"),
    ),
    Clue(
        part="MoE",
        meaning="shared expert",
        facts="n_shared_experts|num_shared_experts|shared_expert_intermediate_size|moe_shared_expert_intermediate_size",
        tensors=r"\bshared_experts?\.",
        operators=("glu",),
    ),
    Clue(
        part="MoE", meaning="gate on the shared expert", tensors=r"\bshared_expert_gate\.", operators=("shared_gate",)
    ),
    Clue(
        part="MoE",
        meaning="experts of a narrower latent width",
        facts=r"routed_expert_hidden_size|moe_latent_size|latent_moe_\w+",
        tensors=r"routed_expert_(down_proj|up_proj|norm)\.|fc[12]_latent_proj\.",
        operators=("linear", "experts"),
    ),
    Clue(
        part="router",
        meaning="sigmoid or softmax routing",
        facts=r"(scoring_func|moe_router_activation_func)(=sigmoid|=softmax)?|topk_method(=noaux_tc|=greedy)?|norm_topk_prob|moe_renormalize"
        "|routed_scaling_factor",
        operators=("router",),
    ),
    Clue(
        part="router",
        meaning="experts in groups",
        facts="n_group|num_expert_group|topk_group|use_grouped_topk",
        operators=("router",),
    ),
    Clue(part="router", meaning="selection bias", tensors=r"e_score_correction_bias$", operators=("router",)),
    Clue(
        part="router",
        meaning="square root of softplus",
        facts="scoring_func=sqrtsoftplus",
        operators=("sqrtsoftplus_router",),
    ),
    Clue(
        part="router",
        meaning="experts from a table by token",
        facts="mlp_layer_types=hash_moe|num_hash_layers",
        tensors=r"tid2eid$",
        operators=("token_table_router",),
    ),
)

REST = (
    Clue(
        part="residual",
        meaning="hyper-connections",
        facts=r"hc_\w+",
        tensors=r"\bhc_(attn|ffn|head)_",
        operators=("hyper_read", "hyper_write", "hyper_head"),
    ),
    Clue(
        part="residual",
        meaning="attention over the outputs of earlier blocks",
        facts=r"attn_res_\w+",
        tensors=r"(self_attention|mlp|output_attn)_res_(norm|proj)\.",
        operators=("attn_res",),
    ),
    Clue(
        part="residual",
        meaning="constant factors on embedding, residual or logits",
        facts=r"residual_multiplier|embedding_multiplier|attention_multiplier|logits_scaling|scale_emb|scale_depth|dim_model_base",
        operators=("scaled_residual",),
    ),
    Clue(
        part="residual",
        meaning="norms after sub-layers",
        tensors=r"(pre|post)_feedforward_layernorm\.",
        operators=("rms_norm",),
    ),
    Clue(
        part="norm",
        meaning="RMSNorm",
        facts="rms_norm_eps|norm_eps",
        tensors=r"(^|\.)(\w+_layernorm|norm)\.weight$",
        operators=("rms_norm",),
    ),
    Clue(
        part="norm",
        meaning="LayerNorm",
        facts="layer_norm_eps(ilon)?|layernorm_epsilon",
        tensors=r"layernorm\.bias$",
        operators=("layer_norm",),
    ),
    Clue(
        part="norm",
        meaning="norm on queries and keys",
        facts="(use_)?qk_(layer)?norm",
        tensors=r"self_attn\.[qk]_norm\.weight$",
        operators=("rms_norm",),
    ),
    Clue(
        part="rope",
        meaning="rotary positions",
        facts=r"rope_theta|rope_interleave|rope_(scaling|parameters)(\.(rope_theta|factor|original_max_position_embeddings|beta_fast|beta_slow"
        r"|mscale|mscale_all_dim|attention_factor|truncate|low_freq_factor|high_freq_factor))?"
        r"|rope_(scaling|parameters)\.(rope_)?type(=default|=linear|=yarn|=llama3)?",
        operators=("rope",),
    ),
    Clue(
        part="rope",
        meaning="several position rows (mRoPE)",
        facts=r"rope_(scaling|parameters)\.(mrope_\w+|(rope_)?type=mrope)",
        operators=("mrope",),
    ),
    Clue(
        part="rope",
        meaning="part of the head rotated",
        facts=r"(rope_parameters\.)?partial_rotary_factor|rotary_(pct|dim)",
        operators=("rope",),
    ),
    Clue(part="rope", meaning="layers without rotation", facts="mla_use_nope|no_rope_layers?|no_rope_layer_interval"),
    Clue(
        part="MTP",
        meaning="multi-token prediction, not run",
        facts=r"num_nextn_predict_layers|num_mtp_layers|mtp_\w+(=.*)?",
        tensors=r"^mtp\.|\.(eh_proj|enorm|hnorm|shared_head)\b",
    ),
    Clue(
        part="weights",
        meaning="quantised checkpoint",
        facts=r"quantization_config(\..*)?",
        tensors=r"(weight_scale(_inv)?|weight_packed|qweight|_blocks|_scales|\.scale)$",
        operators=("dequantise",),
    ),
    Clue(
        part="vision",
        meaning="other modalities, not run",
        facts=r"(vision|audio)_config|(image|video|audio)_\w+",
        tensors=r"(^|\.)(visual|vision_tower|audio_tower|multi_modal_projector)\.",
    ),
    Clue(part="head", meaning="head tied to the embedding", facts="tie_word_embeddings", operators=("linear",)),
    Clue(
        part="size",
        meaning="plain sizes",
        facts="vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|head_dim|max_position_embeddings|model_max_length",
        tensors=r"^(embed_tokens|lm_head)\.weight$",
    ),
)

CLUES = MIXERS + INDEX + FEED_FORWARDS + REST

# a switch that is off takes the meaning from these keys
SWITCHES = {"use_sliding_window": ("sliding_window", "max_window_layers")}
