"""Operators against formulas written out here, and against each other where one is a special case of the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_memory import SCENARIOS, paged, rows_of, state
from tolerances import assert_close
from torch import Tensor

from firstlight.ops.paged.cache import Paged
from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Rows

Body = Callable[[str], Callable[..., Any]]


@pytest.fixture(params=["ref", "eager"])
def body(request: pytest.FixtureRequest, table: OperatorTable) -> Body:
    """Return a function from an operator's name to its body."""
    return lambda operator: table[operator].impl(request.param).load()


@pytest.fixture
def gen() -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(9)


def _one_sequence(gen: torch.Generator, num_tokens: int, entry: tuple[int, ...]) -> tuple[Paged, Rows]:
    pairs = [(0, num_tokens)]
    return paged(gen, pairs, entry, torch.float32), Rows.of(pairs)


def test_sinks_are_one_more_logit_whose_probability_is_dropped(body: Body, gen: torch.Generator) -> None:
    cache, rows = _one_sequence(gen, 20, (2, 1, 8))
    q, sinks = torch.randn(20, 2, 8, generator=gen), torch.tensor([0.5, 40.0])
    k, v = cache.read(0, 20)[:, :, 0].unbind(1)
    expected = torch.zeros(20, 2, 8)
    for t in range(20):
        for head in range(2):
            logits = [0.3 * float(q[t, head] @ k[s]) for s in range(t + 1)]
            total = sum(math.exp(x - 40) for x in logits) + math.exp(float(sinks[head]) - 40)
            expected[t, head] = sum(math.exp(x - 40) / total * v[s] for s, x in enumerate(logits))
    assert_close(body("attention")(q, cache, rows, scaling=0.3, sinks_N=sinks), expected)


def test_a_sink_of_minus_infinity_changes_nothing(body: Body, gen: torch.Generator) -> None:
    cache, rows = _one_sequence(gen, 63, (2, 2, 8))
    q = torch.randn(63, 4, 8, generator=gen)
    sinks = torch.full((4,), float("-inf"))
    attention = body("attention")
    assert_close(attention(q, cache, rows, scaling=0.3, sinks_N=sinks), attention(q, cache, rows, scaling=0.3))


@pytest.mark.parametrize("window", [1, 5, 62, 63, 64])
def test_a_window_of_w_sees_the_last_w_keys(body: Body, gen: torch.Generator, window: int) -> None:
    cache, rows = _one_sequence(gen, 63, (2, 2, 8))
    q = torch.randn(63, 2, 8, generator=gen)
    distance = torch.arange(63)[:, None] - torch.arange(63)
    visible = (distance >= 0) & (distance < window)
    k, v = cache.read(0, 63).unbind(1)
    scores = (torch.einsum("tnd,snd->nts", q, k) * 0.3).masked_fill(~visible, float("-inf"))
    expected = torch.einsum("nts,snd->tnd", scores.softmax(-1), v)
    assert_close(body("attention")(q, cache, rows, scaling=0.3, sliding_window=window), expected)


def test_pages_before_the_window_are_not_read(body: Body, gen: torch.Generator) -> None:
    pairs = [(50, 1), (43, 6), (60, 1)]
    cache, q = paged(gen, pairs, (2, 2, 8), torch.float32), torch.randn(8, 2, 8, generator=gen)
    options = {"scaling": 0.3, "sliding_window": 7}
    expected = body("attention")(q, cache, Rows.of(pairs), **options)
    for row, (start, _) in enumerate(pairs):
        # given back: the table shows the scratch page
        cache.table_RN[row, : (start + 1 - 7) // 8] = 0
    assert_close(body("attention")(q, cache, Rows.of(pairs), **options), expected)


def test_mla_is_attention_over_the_expanded_keys_and_values(body: Body, gen: torch.Generator) -> None:
    latent, rows = _one_sequence(gen, 63, (12 + 4,))
    weight = torch.randn(3 * (8 + 12), 12, generator=gen)
    q = torch.randn(63, 3, 12, generator=gen)
    rows_SL = latent.read(0, 63)
    expanded = (rows_SL[:, :12] @ weight.T).view(63, 3, 20)
    k = torch.cat([expanded[..., :8], rows_SL[:, None, 12:].expand(-1, 3, -1)], dim=-1)
    kv = paged(gen, [(0, 63)], (2, 3, 12), torch.float32, written=[0])
    body("cache_write")(torch.stack([k, expanded[..., 8:]], dim=1), kv, rows)
    found = body("mla")(q[..., :8], q[..., 8:], latent, weight, rows, scaling=0.1, v_head_dim=12)
    assert_close(found, body("attention")(q, kv, rows, scaling=0.1))


def test_absorbed_mla_is_right_for_rows_of_any_length(table: OperatorTable, gen: torch.Generator) -> None:
    pairs, rows = SCENARIOS["ragged"], rows_of("ragged")
    latent = paged(gen, pairs, (20,), torch.float32)
    q = torch.randn(rows.num_tokens, 3, 12, generator=gen)
    args = (q[..., :8], q[..., 8:], latent, torch.randn(3 * 14, 16, generator=gen) / 4, rows)
    truth = table["mla"].impl("ref").load()(*args, scaling=0.3, v_head_dim=6)
    assert_close(table["mla"].impl("absorbed").load()(*args, scaling=0.3, v_head_dim=6), truth)


def test_sparse_mla_over_every_visible_token_is_mla(body: Body, gen: torch.Generator) -> None:
    latent, rows = _one_sequence(gen, 40, (16 + 4,))
    q, weight = torch.randn(40, 3, 12, generator=gen), torch.randn(3 * 14, 16, generator=gen) / 4
    slots = latent.slots(torch.zeros(40, dtype=torch.int64), torch.arange(40))
    visible = torch.arange(40)[:, None] >= torch.arange(40)
    chosen = torch.where(visible, slots, -1).int()
    options = {"scaling": 0.3, "v_head_dim": 6}
    found = body("sparse_mla")(q[..., :8], q[..., 8:], latent, chosen, weight, **options)
    assert_close(found, body("mla")(q[..., :8], q[..., 8:], latent, weight, rows, **options))


def test_sparse_mla_without_a_slot_gives_zeros(body: Body, gen: torch.Generator) -> None:
    latent, _ = _one_sequence(gen, 8, (16,))
    q, none = torch.randn(2, 3, 8, generator=gen), torch.full((2, 5), -1, dtype=torch.int32)
    weight = torch.randn(3 * 14, 16, generator=gen)
    found = body("sparse_mla")(q, q[..., :0], latent, none, weight, scaling=0.3, v_head_dim=6)
    assert torch.equal(found, torch.zeros(2, 3, 6))


def _positions(latent: Paged, slots_K: Tensor) -> list[int]:
    order = latent.slots(
        torch.zeros(200, dtype=torch.int64), torch.arange(200).clamp(max=latent.table_RN.shape[1] * 8 - 1)
    )
    return [order.tolist().index(slot) for slot in slots_K.tolist() if slot >= 0]


@pytest.mark.parametrize("history", [4, 5, 6])
def test_equal_keys_keep_the_smaller_positions(body: Body, gen: torch.Generator, history: int) -> None:
    """topk 5 against K - 1, K and K + 1 earlier tokens and the token itself, all with the same score."""
    pairs = [(history - 1, 1)]
    keys, latent = (paged(gen, pairs, (8,), torch.float32) for _ in range(2))
    keys.flat()[~keys.flat().isnan()] = 1.0
    args = (torch.ones(1, 2, 8), torch.ones(1, 2), keys, Rows.of(pairs), latent)
    kept = body("index_topk")(*args, topk=5)[0]
    assert _positions(latent, kept) == list(range(min(history, 5)))
    assert (kept == -1).sum() == max(0, 5 - history)


def test_zero_scores_in_the_middle_of_the_ranking_keep_the_smaller_positions(body: Body, gen: torch.Generator) -> None:
    """A negative head weight ranks zeros above: the cut falls among the zeros, as it does in trained models."""
    pairs = [(9, 1)]
    keys, latent = paged(gen, pairs, (1,), torch.float32), paged(gen, pairs, (1,), torch.float32)
    values = [-1.0, 2.0, -3.0, -1.0, 5.0, -2.0, -1.0, 7.0, -4.0, -1.0]
    keys.flat()[keys.slots(torch.zeros(10, dtype=torch.int64), torch.arange(10))] = torch.tensor(values)[:, None]
    args = (torch.ones(1, 1, 1), -torch.ones(1, 1), keys, Rows.of(pairs), latent)
    assert _positions(latent, body("index_topk")(*args, topk=4)[0]) == [0, 2, 3, 5]
    # six zeros, then the least negative scores
    assert _positions(latent, body("index_topk")(*args, topk=8)[0]) == [0, 1, 2, 3, 5, 6, 8, 9]


def test_an_open_pool_is_selected_only_as_tail(body: Body, gen: torch.Generator) -> None:
    pairs = [(0, 11)]
    keys, latent = paged(gen, pairs, (8,), torch.float32, tokens_per_entry=4), paged(gen, pairs, (1,), torch.float32)
    args = (torch.randn(11, 2, 8, generator=gen), torch.ones(11, 2), keys, Rows.of(pairs), latent)
    without = body("index_topk")(*args, topk=8, pool_size=4)
    with_tail = body("index_topk")(*args, topk=8, pool_size=4, always_tail=True)
    assert without.shape == (11, 8)
    assert with_tail.shape == (11, 11)
    for t in range(11):
        closed = list(range((t + 1) // 4 * 4))
        assert _positions(latent, without[t]) == closed
        assert _positions(latent, with_tail[t]) == list(range(t + 1))


@pytest.mark.parametrize("form", ["softplus", "bounded"])
def test_decay_is_finite_and_never_positive_for_extreme_gates(body: Body, form: str) -> None:
    z = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 19.9, 20.1, 90.0, 1e4])[:, None]
    a_log, bias = torch.tensor([2.0]), torch.tensor([0.5])
    found = body("decay_gate")(z, a_log, bias, form=form, lower_bound=-5.0)
    x, rate = z.double() + 0.5, math.exp(2.0)
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    expected = -rate * softplus if form == "softplus" else -5.0 / (1 + torch.exp(-(rate * x).clamp(-700, 700)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("channel", [True, False])
def test_total_decay_forgets_everything_before(body: Body, gen: torch.Generator, channel: bool) -> None:
    """A decay of -1e4 or -inf at token 40 makes the rest equal to a sequence that starts there."""
    q, k, v = (torch.randn(100, 2, 8, generator=gen) for _ in range(3))
    beta = torch.rand(100, 2, generator=gen)
    g = -torch.rand(*((100, 2, 8) if channel else (100, 2)), generator=gen)
    for wipe in (-1e4, float("-inf")):
        g[40] = wipe
        carried = state(gen, [(3, 100)], (2, 8, 8), torch.float32)
        whole = body("delta_rule")(q, k, v, g, beta, carried, Rows.of([(3, 100)]))
        fresh = state(gen, [(0, 60)], (2, 8, 8), torch.float32)
        rest = body("delta_rule")(q[40:], k[40:], v[40:], g[40:], beta[40:], fresh, Rows.of([(0, 60)]))
        assert_close(whole[40:], rest)
        assert_close(carried.data[carried.slots_R], fresh.data[fresh.slots_R])


def test_without_decay_the_last_value_of_a_key_is_read_back(body: Body) -> None:
    """beta = 1 and orthonormal keys: the state is a table, and writing a key again replaces its value."""
    keys = torch.eye(8)[[0, 3, 5, 3]][:, None]
    values = torch.arange(1.0, 5.0)[:, None, None].expand(-1, 1, 6)
    carried = state(torch.Generator(), [(0, 4)], (1, 6, 8), torch.float32)
    out = body("delta_rule")(
        8**0.5 * keys, keys, values, torch.zeros(4, 1), torch.ones(4, 1), carried, Rows.of([(0, 4)]), qk_l2norm=False
    )
    assert_close(out, values)
    table = carried.data[carried.slots_R][0, 0]
    assert_close(table[:, [0, 3, 5]], torch.tensor([[1.0, 4.0, 3.0]]).expand(6, -1))


def test_rope_depends_on_relative_positions_only(body: Body, gen: torch.Generator) -> None:
    q, k = torch.randn(1, 1, 8, generator=gen), torch.randn(1, 1, 8, generator=gen)
    inv_freq = 10.0 ** -(torch.arange(4) / 4)
    for layout in ("half", "interleave"):
        dots = []
        for shift in (0, 50):
            at = [body("rope")(x, torch.tensor([p + shift]), inv_freq, layout=layout) for x, p in ((q, 9), (k, 4))]
            dots.append((at[0] * at[1]).sum()[None])
        assert_close(dots[1], dots[0])


def test_sinkhorn_makes_rows_and_columns_of_comb_sum_to_one(body: Body, gen: torch.Generator) -> None:
    x, fn = torch.randn(63, 4, 8, generator=gen), torch.randn(24, 32, generator=gen) / 6
    args = (x, fn, torch.randn(24, generator=gen), torch.ones(3))
    _, post, comb = body("hyper_read")(*args, sinkhorn_iters=50, eps=1e-7, norm_eps=1e-6)
    ones = torch.ones(63, 4)
    assert_close(comb.sum(1), ones)
    assert_close(comb.sum(2), ones)
    assert post.min() >= 0
    assert post.max() <= 2


def test_equal_expert_scores_keep_the_smaller_ids(body: Body) -> None:
    options = {"top_k": 3, "renorm": True, "scale": 2.0, "score": "sigmoid"}
    weights, ids = body("router")(torch.zeros(2, 4), torch.zeros(8, 4), None, num_groups=1, topk_groups=1, **options)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert ids.dtype == torch.int32
    assert_close(weights, torch.full((2, 3), 2 / 3))
    # groups of two: the last two have the largest sums, so expert 2, best of all, is out; 6 and 7 tie
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0, 4.0, 2.0, 3.0, 3.0])
    _, ids = body("router")(torch.zeros(2, 4), torch.zeros(8, 4), bias, num_groups=4, topk_groups=2, **options)
    assert ids.tolist() == [[4, 6, 7]] * 2


def test_an_expert_that_was_not_chosen_cannot_spoil_a_token(body: Body, gen: torch.Generator) -> None:
    x, gate_up, down = (torch.randn(*shape, generator=gen) for shape in ((2, 4), (3, 12, 4), (3, 4, 6)))
    ids, weights = torch.tensor([[0, 2], [2, 0]], dtype=torch.int32), torch.rand(2, 2, generator=gen)
    expected = body("experts")(x, ids, weights, gate_up, down, kind="silu")
    gate_up[1], down[1] = float("inf"), float("nan")
    assert_close(body("experts")(x, ids, weights, gate_up, down, kind="silu"), expected)


def test_gates_and_activations_are_their_formulas(body: Body) -> None:
    x, gate = torch.tensor([[2.0, -3.0, 0.5]]), torch.tensor([[0.0, 1.0, -2.0]])
    sigmoid = [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]
    assert_close(body("output_gate")(x, gate, act="sigmoid"), x * torch.tensor([sigmoid]))
    assert_close(body("output_gate")(x, gate, act="silu"), x * gate * torch.tensor([sigmoid]))
    # w . x = 2 - 3 + 0.5
    assert_close(body("shared_gate")(2 * x, x, torch.ones(1, 3)), 2 * x / (1 + math.exp(0.5)))
    assert_close(body("activation")(x, kind="relu2"), torch.tensor([[4.0, 0.0, 0.25]]))
    gelu = [g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) for g in gate[0].tolist()]
    assert_close(body("glu")(torch.cat([gate, x], dim=1), kind="gelu_tanh"), x * torch.tensor([gelu]))


def test_a_gate_is_rounded_once_and_gates_in_fp32(body: Body, gen: torch.Generator) -> None:
    x, gate, weight = (torch.randn(*shape, generator=gen).bfloat16() for shape in ((63, 40), (63, 40), (1, 40)))
    for act in ("sigmoid", "silu"):
        exact = body("output_gate")(x.float(), gate.float(), act=act)
        assert torch.equal(body("output_gate")(x, gate, act=act), exact.bfloat16())
    # the sum of w . x in bf16 would be off by more than the rounding of the result
    exact = x.double() * torch.sigmoid(gate.double() @ weight.double().T)
    found = body("shared_gate")(x, gate, weight)
    assert ((found.double() - exact) / exact).abs().max() <= 2.0**-8


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
def test_a_norm_behind_an_open_gate_is_a_norm_and_per_group_a_norm_of_each(
    body: Body, gen: torch.Generator, act: str
) -> None:
    x, weight = torch.randn(63, 2, 8, generator=gen), torch.randn(2, 8, generator=gen)
    gate = torch.randn(63, 2, 8, generator=gen)
    found = body("gated_rms_norm")(x, gate, weight, eps=1e-5, act=act, gate_first=True)
    gated = body("output_gate")(x, gate, act=act)
    for group in range(2):
        assert_close(found[:, group], body("rms_norm")(gated[:, group], weight[group], eps=1e-5))
    # the gate scales what leaves the norm, not what enters it
    late = body("gated_rms_norm")(x, gate, weight, eps=1e-5, act=act)
    assert_close(late, body("output_gate")(body("rms_norm")(x, weight, eps=1e-5), gate, act=act))
    assert (late - found).abs().max() > 0.1


EXPERT = (
    torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
)  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        ("glu", (torch.ones(1, 4),), {"kind": "relu"}),
        ("glu", (torch.ones(1, 4),), {"kind": "clamp"}),
        ("glu", (torch.ones(1, 4),), {"kind": "relu2"}),
        ("activation", (torch.ones(1, 4),), {"kind": "silu"}),
        ("output_gate", (torch.ones(1, 4), torch.ones(1, 4)), {"act": "tanh"}),
        ("experts", EXPERT, {"kind": "gelu"}),
        ("experts", EXPERT, {"kind": "clamp"}),
        ("short_conv", (torch.ones(0, 4), torch.ones(4, 2), None, Rows.of([])), {"act": "relu"}),
        ("rope", (torch.ones(1, 1, 4), torch.zeros(1), torch.ones(2)), {"layout": "halves"}),
        ("gated_rms_norm", (torch.ones(1, 4), torch.ones(1, 4), torch.ones(4)), {"eps": 1e-6, "act": "tanh"}),
        ("decay_gate", (torch.ones(1, 2), torch.ones(2), torch.ones(2)), {"form": "exp"}),
        ("decay_gate", (torch.ones(1, 2), torch.ones(2), torch.ones(2)), {"form": "bounded"}),
    ],
)
def test_an_unknown_option_is_refused_with_its_value(
    body: Body, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        body(operator)(*args, **kwargs)


def test_cache_write_refuses_entries_of_several_tokens(body: Body, gen: torch.Generator) -> None:
    cache = paged(gen, [(0, 8)], (4,), torch.float32, tokens_per_entry=4)
    with pytest.raises(ValueError, match="one token per entry, got 4"):
        body("cache_write")(torch.ones(8, 4), cache, Rows.of([(0, 8)]))
