"""A sequence cut into steps, down to single tokens, gives what one step gives; other rows stay as they were.

Every body is compared with itself: whole == chunked == token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_memory import paged, small_integers, state
from tolerances import assert_close
from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.registry import operator_table
from firstlight.ops.rows import Rows

TABLE = operator_table()
NUM_TOKENS = 130
SPLITS = {
    "63 + 1 + 66": [63, 1, 66],
    "64 + 0 + 66": [64, 0, 66],
    "steps of 5": [5] * 26,
    "2 + 126 + 2": [2, 126, 2],
    "token by token": [1] * NUM_TOKENS,
}
# the sequence, and a row with history that has no token in any step
PAIRS = [(0, NUM_TOKENS), (9, 0)]

Step = Callable[[slice, Rows], Tensor | None]
Stream = Callable[[str, torch.dtype, torch.Generator], tuple[Step, list[Paged | State]]]


def _body(operator: str, body: str) -> Callable[..., Any]:
    return TABLE[operator].impl(body).load()


def _short_conv(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    x, weight = torch.randn(NUM_TOKENS, 12, generator=gen).to(dtype), torch.randn(12, 4, generator=gen)
    window, run = state(gen, PAIRS, (3, 12), dtype), _body("short_conv", body)
    return lambda cut, rows: run(x[cut], weight, window, rows), [window]


def _delta_rule(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    q, k, v = (torch.randn(NUM_TOKENS, 4, 8, generator=gen).to(dtype) for _ in range(3))
    g, beta = -torch.randn(NUM_TOKENS, 4, 8, generator=gen).square(), torch.rand(NUM_TOKENS, 4, generator=gen)
    carried, run = state(gen, PAIRS, (4, 8, 8), torch.float32), _body("delta_rule", body)
    return lambda cut, rows: run(q[cut], k[cut], v[cut], g[cut], beta[cut], carried, rows), [carried]


def _attention(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    q, values = (torch.randn(NUM_TOKENS, 4, 16, generator=gen).to(dtype) for _ in range(2))
    values = values.view(NUM_TOKENS, 2, 2, 16)
    cache, run, write = (
        paged(gen, PAIRS, (2, 2, 16), dtype, written=[0, 9]),
        _body("attention", body),
        _body("cache_write", "eager"),
    )
    sinks = torch.randn(4, generator=gen)

    def step(cut: slice, rows: Rows) -> Tensor:
        write(values[cut], cache, rows)
        plain = run(q[cut], cache, rows, scaling=0.25)
        window = run(q[cut], cache, rows, scaling=0.25, sliding_window=7)
        return torch.cat(
            [plain, window, run(q[cut], cache, rows, scaling=0.25, sliding_window=64, sinks_N=sinks)], dim=1
        )

    return step, [cache]


def _mla(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    nope, rope, values = (torch.randn(NUM_TOKENS, 60, generator=gen).to(dtype) for _ in range(3))
    nope, rope, values = nope[:, :24].view(-1, 3, 8), rope[:, :12].view(-1, 3, 4), values[:, :20]
    weight = (torch.randn(3 * 14, 16, generator=gen) / 4).to(dtype)
    cache, run, write = (
        paged(gen, PAIRS, (20,), dtype, written=[0, 9]),
        _body("mla", body),
        _body("cache_write", "eager"),
    )

    def step(cut: slice, rows: Rows) -> Tensor:
        write(values[cut], cache, rows)
        out: Tensor = run(nope[cut], rope[cut], cache, weight, rows, scaling=0.3, v_head_dim=6)
        return out

    return step, [cache]


def _cache_write(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    values = torch.randn(NUM_TOKENS, 2, 3, generator=gen).to(dtype)
    cache, run = paged(gen, PAIRS, (2, 3), dtype, written=[0, 9]), _body("cache_write", body)
    return lambda cut, rows: run(values[cut], cache, rows), [cache]


def _index_pool(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    k, gate = (torch.randn(NUM_TOKENS, 8, generator=gen).to(dtype) for _ in range(2))
    ring, run, ape = state(gen, PAIRS, (4, 2, 8), dtype), _body("index_pool", body), torch.randn(4, 8, generator=gen)
    keys = paged(gen, PAIRS, (8,), dtype, tokens_per_entry=4, written=[0, 2])
    return lambda cut, rows: run(k[cut], gate[cut], ape, ring, keys, rows), [ring, keys]


def _index_topk(body: str, dtype: torch.dtype, gen: torch.Generator) -> tuple[Step, list[Paged | State]]:
    """Whole-number keys: scores tie often and are exact, so the selections must be equal."""
    q, weights = small_integers(gen, NUM_TOKENS, 2, 16).to(dtype), small_integers(gen, NUM_TOKENS, 2).to(dtype)
    keys, latent = paged(gen, PAIRS, (16,), dtype, integers=True, tokens_per_entry=2), paged(gen, PAIRS, (1,), dtype)
    run, options = _body("index_topk", body), {"topk": 12, "pool_size": 2, "always_tail": True}
    return lambda cut, rows: run(q[cut], weights[cut], keys, rows, latent, **options), []


STREAMS: dict[str, Stream] = {
    "short_conv": _short_conv,
    "delta_rule": _delta_rule,
    "attention": _attention,
    "mla": _mla,
    "cache_write": _cache_write,
    "index_pool": _index_pool,
    "index_topk": _index_topk,
}


def _run(stream: Stream, body: str, dtype: torch.dtype, lengths: list[int]) -> list[Tensor]:
    step, caches = stream(body, dtype, torch.Generator().manual_seed(11))
    outputs, start = [], 0
    for n in lengths:
        output = step(slice(start, start + n), Rows.of([(start, n), (9, 0)]))
        outputs += [] if output is None else [output]
        start += n
    assert start == NUM_TOKENS
    returned = [torch.cat(outputs)] if outputs else []
    return returned + [cache.data for cache in caches]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("operator", "body"), [(op, impl.name) for op in STREAMS for impl in TABLE[op].impls])
def test_a_sequence_in_steps_gives_what_one_step_gives(
    operator: str, body: str, dtype: torch.dtype, split: str
) -> None:
    whole = _run(STREAMS[operator], body, dtype, [NUM_TOKENS])
    steps = _run(STREAMS[operator], body, dtype, SPLITS[split])
    for actual, expected in zip(steps, whole, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(("operator", "body"), [(op, impl.name) for op in STREAMS for impl in TABLE[op].impls])
def test_an_empty_row_leaves_its_state_and_pages_untouched(operator: str, body: str) -> None:
    step, caches = STREAMS[operator](body, torch.float32, torch.Generator().manual_seed(3))
    before = [cache.data.clone() for cache in caches]
    step(slice(0, 0), Rows.of([(0, 0), (9, 0)]))
    for cache, data in zip(caches, before, strict=True):
        torch.testing.assert_close(cache.data, data, rtol=0, atol=0, equal_nan=True)
