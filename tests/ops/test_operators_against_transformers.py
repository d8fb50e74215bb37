"""Reference and eager bodies against the modules of transformers that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_memory import paged, state
from tolerances import assert_close
from torch import Tensor

from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Rows

pytest.importorskip("transformers")

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

Body = Callable[[str], Callable[..., Any]]


@pytest.fixture(params=["ref", "eager"])
def body(request: pytest.FixtureRequest, table: OperatorTable) -> Body:
    """Return a function from an operator's name to its body."""
    return lambda operator: table[operator].impl(request.param).load()


@pytest.fixture
def gen() -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(5)


def _fill(module: torch.nn.Module, gen: torch.Generator, scale: float = 1.0) -> Any:
    # Any: attributes of a module are typed Tensor | Module
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.copy_(torch.randn(tensor.shape, generator=gen) * scale)
    return module.requires_grad_(False)


def _glm5_config(**changes: Any) -> Glm5NextTextConfig:
    return Glm5NextTextConfig(hidden_size=32, **changes)


@pytest.mark.parametrize("num_tokens", [1, 63, 130])
def test_delta_rule_with_decay_per_channel_is_the_token_loop_of_glm5_next(
    body: Body, gen: torch.Generator, num_tokens: int
) -> None:
    q, k, v = (torch.randn(num_tokens, 4, 8, generator=gen) for _ in range(3))
    g, beta = -5 * torch.rand(num_tokens, 4, 8, generator=gen), torch.rand(num_tokens, 4, generator=gen)
    carried = state(gen, [(7, num_tokens)], (4, 8, 8), torch.float32)
    before_KV = carried.data[carried.slots_R].transpose(-1, -2).clone()
    expected, final_KV = glm5_next.recurrent_kimi_delta_attention(
        *(x[None] for x in (q, k, v, g, beta)), before_KV, True, use_qk_l2norm_in_kernel=True
    )
    assert_close(body("delta_rule")(q, k, v, g, beta, carried, Rows.of([(7, num_tokens)])), expected[0])
    assert_close(carried.data[carried.slots_R], final_KV.transpose(-1, -2))


@pytest.mark.parametrize("num_tokens", [1, 63, 130])
def test_delta_rule_with_decay_per_head_is_the_token_loop_of_qwen3_next(
    body: Body, gen: torch.Generator, num_tokens: int
) -> None:
    q, k = (torch.randn(num_tokens, 2, 8, generator=gen) for _ in range(2))
    v, beta = torch.randn(num_tokens, 6, 5, generator=gen), torch.rand(num_tokens, 6, generator=gen)
    g = -torch.rand(num_tokens, 6, generator=gen)
    carried = state(gen, [(0, num_tokens)], (6, 5, 8), torch.float32)
    expected, final_KV = qwen3_next.torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert_close(body("delta_rule")(q, k, v, g, beta, carried, Rows.of([(0, num_tokens)])), expected[0])
    assert_close(carried.data[carried.slots_R], final_KV.transpose(-1, -2))


@pytest.mark.parametrize(("form", "bound"), [("softplus", None), ("bounded", -5.0)])
def test_decay_gate_is_the_forget_gate_of_glm5_next(
    body: Body, gen: torch.Generator, form: str, bound: float | None
) -> None:
    config = _glm5_config(linear_num_heads=3, linear_head_dim=8, linear_lower_bound=bound)
    gate = _fill(glm5_next.Glm5NextTextForgetGate(config), gen)
    x = 5 * torch.randn(1, 40, 32, generator=gen)
    z = gate.f_b_proj(gate.f_a_proj(x))[0].view(40, 3, 8)
    assert z.min() < -20 < 20 < z.max()
    assert_close(body("decay_gate")(z, gate.A_log, gate.dt_bias, form=form, lower_bound=bound), gate(x)[0])


def test_router_is_the_sigmoid_router_of_glm5_next(body: Body, gen: torch.Generator) -> None:
    config = _glm5_config(num_experts_per_tok=3, n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True)
    module = _fill(glm5_next.Glm5NextTextTopkRouter(config), gen, 0.3)
    x = torch.randn(130, 32, generator=gen)
    _, weights, ids = module(x)
    found, found_ids = body("router")(
        x, module.weight, module.e_score_correction_bias, score="sigmoid", top_k=3,
        num_groups=4, topk_groups=2, renorm=True, scale=module.routed_scaling_factor,
    )  # fmt: skip
    num_experts = module.weight.shape[0]
    assert_close(_dense(found, found_ids, num_experts), _dense(weights, ids, num_experts))


@pytest.mark.parametrize("renorm", [True, False])
def test_router_is_the_softmax_router_of_qwen3_moe(body: Body, gen: torch.Generator, renorm: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=32, num_experts=16, num_experts_per_tok=3, norm_topk_prob=renorm)
    module = _fill(qwen3_moe.Qwen3MoeTopKRouter(config), gen, 0.3)
    x = torch.randn(130, 32, generator=gen)
    _, weights, ids = module(x)
    found, found_ids = body("router")(
        x, module.weight, None, score="softmax", top_k=3, num_groups=1, topk_groups=1, renorm=renorm, scale=1.0
    )
    assert_close(_dense(found, found_ids, 16), _dense(weights, ids, 16))


def _dense(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    return torch.zeros(weights.shape[0], num_experts).scatter(1, ids.long(), weights.float())


def test_hyper_read_and_write_are_the_hyper_connection_of_glm5_next(body: Body, gen: torch.Generator) -> None:
    config = _glm5_config(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    module = _fill(glm5_next.Glm5NextTextHyperConnection(config), gen)
    x, y = torch.randn(63, 4, 32, generator=gen), torch.randn(63, 32, generator=gen)
    post, comb, h = (out[0] for out in module(x[None]))
    numbers = {"sinkhorn_iters": 20, "eps": 1e-6, "norm_eps": 1e-5}
    found = body("hyper_read")(x, module.fn, module.base, module.scale, **numbers)
    for actual, expected in zip(found, (h, post, comb), strict=True):
        assert_close(actual, expected)
    written = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    assert_close(body("hyper_write")(x, y, post, comb), written)
    assert_close(body("hyper_head")(x), glm5_next.Glm5NextTextHyperHead()(x[None])[0])


def _angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].float() * inv_freq
    return torch.cat([angles, angles], dim=-1).cos()[None], torch.cat([angles, angles], dim=-1).sin()[None]


def test_half_rope_is_the_rotation_of_llama(body: Body, gen: torch.Generator) -> None:
    x, positions, inv_freq = (
        torch.randn(63, 3, 16, generator=gen),
        torch.arange(9, 72),
        10000.0 ** -(torch.arange(8) / 8),
    )
    expected, _ = llama.apply_rotary_pos_emb(x[None], x[None], *_angles(positions, inv_freq), unsqueeze_dim=2)
    assert_close(body("rope")(x, positions, inv_freq, layout="half"), expected[0])


def test_interleaved_rope_gives_the_dot_products_of_deepseek_v32(body: Body, gen: torch.Generator) -> None:
    q, k = torch.randn(63, 3, 16, generator=gen), torch.randn(63, 3, 16, generator=gen)
    positions, inv_freq = torch.arange(9, 72), 10000.0 ** -(torch.arange(8) / 8)
    angles = _angles(positions, inv_freq)
    theirs = deepseek_v32.apply_rotary_pos_emb_interleave(q[None], k[None], *angles, unsqueeze_dim=2)
    ours = [body("rope")(x, positions, inv_freq, layout="interleave") for x in (q, k)]
    dots = [torch.einsum("tnd,snd->nts", a, b) for a, b in (ours, [x[0] for x in theirs])]
    assert_close(dots[0], dots[1])


def test_norms_are_those_of_llama_qwen3_next_and_glm5_next(body: Body, gen: torch.Generator) -> None:
    x, gate = torch.randn(63, 32, generator=gen), torch.randn(63, 32, generator=gen)
    plain, plus_one = _fill(llama.LlamaRMSNorm(32, 1e-5), gen), _fill(qwen3_next.Qwen3NextRMSNorm(32, 1e-6), gen)
    gated = _fill(glm5_next.Glm5NextTextRMSNormGated(32, 1e-5), gen)
    for dtype in (torch.float32, torch.bfloat16):
        cast = x.to(dtype)
        assert_close(body("rms_norm")(cast, plain.weight.to(dtype), eps=1e-5), plain.to(dtype)(cast))
        assert_close(body("rms_norm")(cast, plus_one.weight, eps=1e-6, plus_one=True), plus_one(cast))
        found = body("gated_rms_norm")(cast, gate.to(dtype), gated.weight, eps=1e-5, act="sigmoid")
        assert_close(found, gated(cast, gate.to(dtype)))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_norm_after_the_gate_and_per_group_is_that_of_nemotron_h(
    body: Body, gen: torch.Generator, groups: int
) -> None:
    module = _fill(nemotron_h.NemotronHRMSNormGated(32, group_size=32 // groups, eps=1e-5), gen)
    x, gate = torch.randn(63, 32, generator=gen), 3 * torch.randn(63, 32, generator=gen)
    for dtype in (torch.float32, torch.bfloat16):
        cut = [tensor.to(dtype).unflatten(-1, (groups, -1)) for tensor in (x, gate)]
        weight = module.to(dtype).weight.view(groups, -1)
        found = body("gated_rms_norm")(*cut, weight, eps=1e-5, act="silu", gate_first=True)
        assert_close(found.flatten(1), module(x.to(dtype), gate.to(dtype)))


def test_a_norm_before_the_gate_is_that_of_qwen3_next(body: Body, gen: torch.Generator) -> None:
    module = _fill(qwen3_next.Qwen3NextRMSNormGated(32, eps=1e-5), gen)
    x, gate = torch.randn(63, 32, generator=gen), 3 * torch.randn(63, 32, generator=gen)
    for dtype in (torch.float32, torch.bfloat16):
        found = body("gated_rms_norm")(x.to(dtype), gate.to(dtype), module.weight, eps=1e-5, act="silu")
        assert_close(found, module(x.to(dtype), gate.to(dtype)))


def test_output_gate_is_that_of_the_attention_of_qwen3_next(body: Body, gen: torch.Generator) -> None:
    """One token attends to itself only: what enters the gate is v."""
    config = Qwen3NextConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    config._attn_implementation = "eager"
    module = _fill(qwen3_next.Qwen3NextAttention(config, 0), gen)
    x, angles = torch.randn(63, 1, 32, generator=gen), (torch.ones(63, 1, 2), torch.zeros(63, 1, 2))
    _, gate = module.q_proj(x).view(63, 4, 16).chunk(2, dim=-1)
    gated = body("output_gate")(module.v_proj(x).view(63, 4, 8), gate, act="sigmoid")
    assert_close(module.o_proj(gated.flatten(1)), module(x, angles, None)[0][:, 0])


def test_shared_gate_is_that_of_the_experts_of_qwen3_next(body: Body, gen: torch.Generator) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3NextConfig(hidden_size=32, shared_expert_intermediate_size=20, **sizes)
    module = _fill(qwen3_next.Qwen3NextSparseMoeBlock(config), gen)
    # experts that put out nothing leave the shared one
    module.experts.down_proj.zero_()
    x = torch.randn(63, 32, generator=gen) / 3
    found = body("shared_gate")(module.shared_expert(x), x, module.shared_expert_gate.weight)
    assert_close(found, module(x[None])[0])


def test_short_conv_is_the_causal_convolution_of_glm5_next(body: Body, gen: torch.Generator) -> None:
    x, weight, bias = (torch.randn(*shape, generator=gen) for shape in ((63, 12), (12, 4), (12,)))
    window = state(gen, [(0, 63)], (3, 12), torch.float32)
    found = body("short_conv")(x, weight, window, Rows.of([(0, 63)]), bias_C=bias)
    assert_close(found, glm5_next.causal_conv1d_fn(x.T[None], weight, bias, "silu")[0].T)


def test_clamped_glu_is_the_feed_forward_of_glm5_next(body: Body, gen: torch.Generator) -> None:
    module = _fill(glm5_next.Glm5NextTextMLP(_glm5_config(swiglu_limit=2.0), 20), gen)
    x = torch.randn(63, 32, generator=gen)
    gate_up = torch.cat([module.gate_proj(x), module.up_proj(x)], dim=-1)
    assert gate_up.abs().max() > 2.0
    assert_close(module.down_proj(body("glu")(gate_up, kind="clamp", limit=2.0)), module(x))


def test_tanh_gelu_glu_is_the_feed_forward_of_gemma2(body: Body, gen: torch.Generator) -> None:
    module = _fill(gemma2.Gemma2MLP(Gemma2Config(hidden_size=32, intermediate_size=20)), gen, 0.3)
    x = torch.randn(63, 32, generator=gen)
    gate_up = torch.cat([module.gate_proj(x), module.up_proj(x)], dim=-1)
    assert_close(module.down_proj(body("glu")(gate_up, kind="gelu_tanh")), module(x))


def test_relu2_is_the_activation_of_the_feed_forward_of_nemotron_h(body: Body, gen: torch.Generator) -> None:
    module = _fill(nemotron_h.NemotronHMLP(NemotronHConfig(hidden_size=32, intermediate_size=20)), gen)
    x = torch.randn(63, 32, generator=gen)
    assert_close(module.down_proj(body("activation")(module.up_proj(x), kind="relu2")), module(x))


def test_experts_without_a_gate_are_those_of_nemotron_h(body: Body, gen: torch.Generator) -> None:
    config = NemotronHConfig(hidden_size=32, n_routed_experts=6, moe_intermediate_size=10)
    module = _fill(nemotron_h.NemotronHExperts(config), gen, 0.3)
    x, weights = torch.randn(63, 32, generator=gen), torch.rand(63, 3, generator=gen)
    ids = torch.rand(63, 6, generator=gen).argsort(1)[:, :3]
    found = body("experts")(x, ids.int(), weights, module.up_proj, module.down_proj, kind="relu2")
    assert_close(found, module(x, ids, weights))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 63, 130])
@pytest.mark.parametrize("tail", [True, False])
def test_selection_is_that_of_the_pooling_indexer_of_glm5_next(
    body: Body, gen: torch.Generator, num_tokens: int, tail: bool
) -> None:
    config = _glm5_config(
        index_n_heads=16, index_head_dim=16, index_topk=24, index_kpool=4, q_lora_rank=24,
        index_kpool_always_select_tail=tail,
    )  # fmt: skip
    module = _fill(glm5_next.Glm5NextTextIndexer(config, 0), gen)
    x, q_latent = torch.randn(num_tokens, 32, generator=gen), torch.randn(num_tokens, 24, generator=gen)
    theirs = module(x[None], q_latent[None], torch.ones(1, num_tokens, dtype=torch.bool), None)[0]

    pairs, rows = [(0, num_tokens)], Rows.of([(0, num_tokens)])
    keys = paged(gen, pairs, (16,), torch.float32, tokens_per_entry=4, written=[0])
    ring, latent = state(gen, pairs, (4, 2, 16), torch.float32), paged(gen, pairs, (1,), torch.float32)
    gate = x @ module.index_kpool_compress_gate.T
    body("index_pool")(module.k_norm(module.wk(x)), gate, module.index_kpool_compress_ape, ring, keys, rows)
    slots = body("index_topk")(
        module.wq_b(q_latent).view(-1, 16, 16), module.weights_proj(x) * 0.25, keys, rows, latent,
        topk=24, pool_size=4, always_tail=tail,
    )  # fmt: skip
    assert slots.shape == theirs.shape
    position = torch.full((latent.data.shape[0] * 8,), -1).index_put(
        (latent.slots(rows.row_T, rows.positions_T),), rows.positions_T
    )
    for ours, kept in zip(slots, theirs.tolist(), strict=True):
        assert position[ours[ours >= 0].long()].tolist() == sorted(p for p in kept if p >= 0)
