"""Costs against transformers, published sizes and hand-computed work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from reference_configs import TINY, changed, of_transformers, tiny_config, tiny_weights, written
from spec.variants import GROUPED, one_layer, variant

from firstlight.ops.registry import operator_table
from firstlight.plan.explain import memory
from firstlight.plan.planner import Planner
from firstlight.spec.arch import ArchSpec, BlockAttnRes, HyperConnections
from firstlight.spec.cards import card_names
from firstlight.spec.cost import Cost, Tally, contexts, cost, selected_tokens
from firstlight.spec.mixers import GQAttention, Indexer, KeyPool

Declared = Callable[[dict[str, Any]], ArchSpec]
CardArch = Callable[[str], ArchSpec]

# configuration class, cache bytes per token, of which index keys, MiB of state per sequence
CLASS_DEFAULTS = [
    ("LlamaConfig", {}, 524_288, 0, 0.0),
    ("Qwen3Config", {}, 524_288, 0, 0.0),
    ("Qwen3MoeConfig", {"head_dim": 128}, 49_152, 0, 0.0),
    ("Qwen3MoeConfig", {}, 24_576, 0, 0.0),
    ("DeepseekV3Config", {}, 70_272, 0, 0.0),
    ("DeepseekV32Config", {}, 85_888, 15_616, 0.0),
    ("GlmMoeDsaConfig", {}, 109_824, 19_968, 0.0),
    ("KimiLinearConfig", {}, 6_912, 0, 43.5),
    ("Glm5NextTextConfig", {}, 11_440, 176, 140.9),
    ("Glm5NextTextConfig", {"index_kpool": 4}, 11_968, 704, 140.8),
    ("Qwen3NextConfig", {}, 24_576, 0, 73.7),
    ("NemotronHConfig", {"layers_block_type": ["linear_attention"] * 3 + ["full_attention"]}, 4_096, 0, 12.2),
]


def part(costs: Cost, name: str) -> Tally:
    """Return the tally of a part."""
    return next(share.tally for share in costs.parts if share.name == name)


@pytest.mark.parametrize("name", card_names())
def test_parameters_of_a_card_are_those_of_transformers(
    name: str, card_arch: CardArch, card_parameters: Callable[[str], int]
) -> None:
    assert cost(card_arch(name)).total.parameters == card_parameters(name)


@pytest.mark.parametrize("name", TINY)
def test_parameters_of_a_tiny_model_are_those_of_transformers(name: str, declared: Declared) -> None:
    assert cost(declared(tiny_config(name))).total.parameters == sum(map(prod, tiny_weights(name).values()))


@pytest.mark.parametrize(
    ("name", "billions"), [("kimi-linear-48b-a3b", 49.1), ("deepseek-v3.2", 671.9), ("qwen3-30b-a3b", 30.5)]
)
def test_parameters_are_the_published_ones(name: str, billions: float, card_arch: CardArch) -> None:
    assert round(cost(card_arch(name)).total.parameters / 1e9, 1) == billions


@pytest.mark.parametrize(("config_class", "changes", "per_token", "index", "mib"), CLASS_DEFAULTS)
def test_memory_of_class_default_configs(
    config_class: str, changes: dict[str, Any], per_token: int, index: int, mib: float, declared: Declared
) -> None:
    costs = cost(declared(written(of_transformers(config_class)(**changes))), dtype="bfloat16")
    assert costs.total.cache_bytes_per_token == per_token
    assert sum(s.tally.cache_bytes_per_token for s in costs.parts if s.name.startswith("index")) == index
    assert round(costs.total.state_bytes_per_sequence / 2**20, 1) == mib


@pytest.mark.parametrize("name", ["llama", "deepseek_v32", "glm5_next"])
def test_caches_are_as_wide_as_the_backbone_and_as_in_the_plan(name: str, declared: Declared) -> None:
    arch = declared(changed(name, dtype="float32"))
    plan = Planner(arch, operator_table()).build()
    wide, narrow = cost(arch).total, cost(arch, dtype="bfloat16").total
    assert wide.cache_bytes_per_token == 2 * narrow.cache_bytes_per_token
    assert wide.cache_bytes_per_token == memory(plan, arch).cache_bytes_per_token
    assert wide.state_bytes_per_sequence == memory(plan, arch).state_bytes_per_sequence


def test_a_shared_selection_keeps_no_index_keys(declared: Declared) -> None:
    raw = written(of_transformers("GlmMoeDsaConfig")())
    halved = {**raw, "indexer_types": ["full", "shared"] * 39}
    whole, less = (cost(declared(one), dtype="bfloat16").total for one in (raw, halved))
    saved = whole.cache_bytes_per_token - less.cache_bytes_per_token
    assert saved == 39 * 128 * 2


@pytest.mark.parametrize("name", [*card_names()])
def test_parts_add_up_to_the_total_and_layers_to_all_but_the_outside(name: str, card_arch: CardArch) -> None:
    costs = cost(card_arch(name))
    assert sum((share.tally for share in costs.parts), Tally()) == costs.total
    assert sum(costs.flops_share(share.name) for share in costs.parts) == pytest.approx(1.0)
    layers = sum((share.tally for share in costs.layers), Tally())
    outside = part(costs, "embedding").parameters + part(costs, "head").parameters + card_arch(name).hidden_size
    assert costs.total.parameters - layers.parameters == outside


def test_active_parameters_leave_out_the_experts_not_chosen(card_arch: CardArch) -> None:
    total = cost(card_arch("qwen3-30b-a3b")).total
    idle = 48 * (128 - 8) * 3 * 2048 * 768
    assert total.active_parameters == total.parameters - idle
    assert 3.3e9 < total.active_parameters < 3.4e9


def test_weight_bytes_follow_the_dtype_but_for_what_stays_fp32(declared: Declared) -> None:
    arch = declared(tiny_config("kimi_linear"))
    wide, narrow = cost(arch, dtype="float32").total, cost(arch, dtype="bfloat16").total
    assert wide.weight_bytes == 4 * wide.parameters
    # per KDA layer: convolution, A_log, dt_bias, o_norm; per MoE layer: the selection bias
    kept = 4 * (3 * 64 * 4 + 4 + 64 + 16) + 3 * 8
    assert narrow.weight_bytes == 2 * narrow.parameters + 2 * kept


def test_a_tied_head_weighs_nothing_and_multiplies_as_usual(declared: Declared) -> None:
    tied, free = cost(declared(tiny_config("llama_tied"))), cost(declared(tiny_config("llama")))
    assert free.total.parameters - tied.total.parameters == 256 * 64
    assert part(tied, "head (tied)").flops_per_token == part(free, "head").flops_per_token == 2 * 256 * 64


@pytest.mark.parametrize(("window", "visible"), [(None, 1000), (256, 256), (4096, 1000)])
def test_attention_work_counts_the_visible_tokens(window: int | None, visible: int, declared: Declared) -> None:
    arch = declared(tiny_config("llama"))
    mixer = arch.layers[0].mixer
    assert isinstance(mixer, GQAttention)
    layer = replace(arch.layers[0], mixer=replace(mixer, sliding_window=window))
    costs = cost(replace(arch, layers=(layer,)), context=1000)
    projections = 2 * 64 * (64 + 32 + 32 + 64)
    assert costs.layers[0].tally.flops_per_token == projections + 2 * 3 * 64 * 128 + 4 * 4 * 16 * visible


def test_latent_attention_in_both_forms(declared: Declared) -> None:
    arch = declared(tiny_config("deepseek_v3"))
    absorbed, expanded = (part(cost(arch, context=100, mla=form), "MLA") for form in ("absorbed", "expanded"))
    weights = 2 * (24 * 64 + 96 * 24 + 40 * 64 + 4 * 28 * 32 + 64 * 48)
    assert absorbed.flops_per_token == 4 * (weights + 2 * 4 * (40 + 32) * 100)
    assert expanded.flops_per_token == 4 * (weights + 2 * 4 * (24 + 12) * 100)


@pytest.mark.parametrize(("context", "attended"), [(10, 10), (16, 16), (1000, 16)])
def test_sparse_attention_and_index_work(context: int, attended: int, declared: Declared) -> None:
    arch = declared(tiny_config("deepseek_v32"))
    costs = cost(arch, context=context)
    short = cost(arch, context=1)
    attention, index = "sparse MLA(top 16)", "index"
    assert (part(costs, attention).flops_per_token - part(short, attention).flops_per_token) == 4 * 2 * 4 * 72 * (
        attended - 1
    )
    assert part(costs, index).flops_per_token - part(short, index).flops_per_token == 4 * 2 * 6 * 16 * (context - 1)
    assert cost(arch, context=context, mla="expanded").total == costs.total


@pytest.mark.parametrize(("context", "tail", "tokens"), [(3, True, 3), (18, True, 18), (99, True, 19), (99, False, 16)])
def test_a_pooled_index_selects_whole_pools_and_the_open_tail(context: int, tail: bool, tokens: int) -> None:
    indexer = Indexer(num_heads=1, head_dim=4, topk=16, pool=KeyPool(size=4, always_tail=tail))
    assert selected_tokens(indexer, context) == tokens


def test_a_pooled_index_scores_one_entry_per_pool(declared: Declared) -> None:
    arch = declared(tiny_config("glm5_next"))
    short, long = (part(cost(arch, context=n), "index(pools of 4)").flops_per_token for n in (3, 403))
    assert long - short == 2 * (2 * 6 * 16 * 100)


def test_the_work_of_a_recurrence_does_not_grow_with_the_context(declared: Declared) -> None:
    arch = declared(tiny_config("kimi_linear"))
    short, long = (part(cost(arch, context=n), "KDA") for n in (1, 100_000))
    inputs = 3 * 64 + 4 + 16 + 16  # q, k, v, b, f_a and g_a, each from 64
    weights = 2 * (inputs * 64 + 3 * 64 * 4 + 2 * 64 * 16 + 64 * 64)
    assert short == long
    assert short.flops_per_token == 4 * (weights + 7 * 4 * 16 * 16)


def test_a_state_space_costs_its_projections_and_five_per_element_of_its_state() -> None:
    short, long = (part(cost(variant("state space"), context=n), "Mamba2") for n in (1, 100))
    width, channels, heads = 60, 60 + 2 * 2 * 8, 6
    projections, conv = 64 * (width + channels + heads) + 64 * width, channels * 4
    assert short == long
    assert short.flops_per_token == 2 * (projections + conv) + 5 * heads * 10 * 8
    # beside the products: bias of the convolution, A_log, D and dt_bias, and the norm
    assert short.parameters == projections + conv + channels + 3 * heads + width
    assert short.state_bytes_per_sequence == 4 * heads * 10 * 8 + 2 * 3 * channels


def test_experts_of_a_latent_width_cost_two_narrow_matrices_each_and_the_way_there_and_back() -> None:
    tally = part(cost(variant("latent experts, normed"), context=9), "MoE(8, top 3, latent 24)")
    router, expert, latent, shared = 8 * 64, 2 * 20 * 24, 2 * 24 * 64, 2 * 28 * 64
    assert tally.flops_per_token == 2 * (router + 3 * expert + latent + shared)
    # 8: the selection bias; 24: the norm
    assert tally.parameters == router + 8 + 8 * expert + latent + 24 + shared
    assert tally.active_parameters == tally.parameters - 5 * expert


@pytest.mark.parametrize(
    ("name", "label", "extra"),
    [
        ("gate from q_proj", "gated GQA", 96 * 64),
        ("gate on the hidden state", "gated GQA", 96 * 64),
        ("low-rank gate, window", "gated GQA(window 7)", 5 * (96 + 64)),
    ],
)
def test_a_gate_costs_its_projection(name: str, label: str, extra: int) -> None:
    gated, plain = part(cost(variant(name), context=7), label), part(cost(one_layer(GROUPED), context=7), "GQA")
    assert gated.parameters - plain.parameters == extra
    assert gated.flops_per_token - plain.flops_per_token == 2 * extra


def test_the_layout_of_a_recurrence_changes_neither_its_size_nor_its_work() -> None:
    names = ("delta rule, separate", "delta rule, qkv in one", "delta rule, grouped")
    assert len({part(cost(variant(name)), "GDN") for name in names}) == 1


def test_the_work_of_hyper_connections(declared: Declared) -> None:
    arch = replace(
        declared(tiny_config("llama")), residual=HyperConnections(mult=3, sinkhorn_iters=2, eps=1e-6, norm_eps=1e-6)
    )
    projection, mixing = 2 * 15 * 3 * 64, (4 * 3 + 2 * 9) * 64
    assert part(cost(arch), "hyper-connections(3)").flops_per_token == 4 * 2 * (projection + mixing)


def test_the_work_of_block_residual_attention_counts_the_sources_so_far(declared: Declared) -> None:
    arch = replace(declared(tiny_config("llama")), residual=BlockAttnRes(block_size=2))
    # sources seen by mixer and feed-forward: layer 0 1+2, layer 1 2+2, layer 2 2+3, layer 3 3+3; at the end 3
    weights = 2 * 64 * (2 * 4 + 1)
    assert part(cost(arch), "block residual attention(2)").flops_per_token == weights + 4 * 64 * (3 + 4 + 5 + 6 + 3)


def test_decode_flops_of_kimi_linear_are_about_twice_its_active_parameters(card_arch: CardArch) -> None:
    total = cost(card_arch("kimi-linear-48b-a3b"), context=1).total
    embedding = 163840 * 2304
    assert total.flops_per_token / 2 == pytest.approx(total.active_parameters - embedding, rel=0.02)


def test_cost_is_serialisable_and_names_its_assumptions(card_arch: CardArch) -> None:
    found = json.loads(json.dumps(cost(card_arch("kimi-linear-48b-a3b"), context=7, mla="expanded").to_dict()))
    assert (found["context"], found["mla"], found["dtype"]) == (7, "expanded", "bfloat16")
    assert found["caches"] == {"kv": "bfloat16", "index": "bfloat16", "state": "float32"}
    assert len(found["layers"]) == 27


@pytest.mark.parametrize("arguments", [{"dtype": "int3"}, {"context": 0}])
def test_a_cost_without_meaning_is_refused(arguments: dict[str, Any], declared: Declared) -> None:
    with pytest.raises(ValueError, match="no cost for"):
        cost(declared(tiny_config("llama")), **arguments)


def test_an_unknown_part_has_no_share(declared: Declared) -> None:
    with pytest.raises(KeyError):
        cost(declared(tiny_config("llama"))).flops_share("nothing")


@pytest.mark.parametrize(
    ("longest", "told"), [(1000, (1000,)), (4096, (4096,)), (8192, (4096, 8192)), (1 << 20, (4096, 131072))]
)
def test_costs_are_told_for_contexts_that_the_model_takes(
    longest: int, told: tuple[int, ...], declared: Declared
) -> None:
    assert contexts(replace(declared(tiny_config("llama")), max_position_embeddings=longest)) == told
