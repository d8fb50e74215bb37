"""Input makers: what each operator is called with in the suite of bodies. A new operator adds one function here.

A maker gets a `Setting` and yields named calls. It must build the same inputs every time it runs, since each
body gets its own copy of the caches that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from op_memory import SCENARIOS, paged, small_integers, state
from torch import Tensor

from firstlight.ops.rows import Rows


@dataclass(frozen=True)
class Call:
    """Arguments of one call, and a name for the report."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """Number format, device and rows of a case."""

    dtype: torch.dtype
    device: str
    scenario: str
    gen: torch.Generator

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(start, n) of every row."""
        return SCENARIOS[self.scenario]

    @property
    def rows(self) -> Rows:
        """The rows on the device."""
        return Rows.of(self.pairs, self.device)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(n for _, n in self.pairs)

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Return normal values in the dtype of the case."""
        return (torch.randn(*shape, generator=self.gen) * scale).to(self.device, dtype or self.dtype)

    def integers(self, *shape: int, bound: int = 2, dtype: torch.dtype | None = None) -> Tensor:
        """Return whole numbers, exact in every dtype, with frequent ties."""
        return small_integers(self.gen, *shape, bound=bound).to(self.device, dtype or self.dtype)

    def paged(self, entry: tuple[int, ...], **options: Any) -> Any:
        """Return a cache of the rows."""
        return paged(self.gen, self.pairs, entry, options.pop("dtype", self.dtype), device=self.device, **options)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        """Return state slots of the rows."""
        return state(self.gen, self.pairs, shape, dtype or self.dtype, device=self.device)


def rms_norm(s: Setting) -> Iterator[Call]:
    x, heads, weight = s.randn(s.num_tokens, 48), s.randn(s.num_tokens, 3, 16), s.randn(48)
    yield Call("weighted", (x, weight), {"eps": 1e-5})
    yield Call("plus_one", (x, weight), {"eps": 1e-6, "plus_one": True})
    yield Call("unweighted", (x, None), {"eps": 1e-6})
    yield Call("heads, fp32 weight", (heads, s.randn(16, dtype=torch.float32)), {"eps": 1e-5})
    yield Call("tiny", (x * 1e-4, weight), {"eps": 1e-6})
    for plus_one in (False, True):
        yield Call(f"a weight per group, {plus_one}", (heads, s.randn(3, 16)), {"eps": 1e-6, "plus_one": plus_one})


def layer_norm(s: Setting) -> Iterator[Call]:
    x = s.randn(s.num_tokens, 48) + 3
    yield Call("bias", (x, s.randn(48), s.randn(48)), {"eps": 1e-6})
    yield Call("no bias", (x, s.randn(48), None), {"eps": 1e-5})


def gated_rms_norm(s: Setting) -> Iterator[Call]:
    x, gate = s.randn(s.num_tokens, 3, 16), s.randn(s.num_tokens, 3, 16, scale=3.0)
    for act in ("sigmoid", "silu"):
        for weight, name in ((s.randn(16), "one weight"), (s.randn(3, 16), "a weight per group")):
            for first in (False, True):
                kwargs = {"eps": 1e-5, "act": act, "gate_first": first}
                yield Call(f"{act}, {name}, gate first {first}", (x, gate, weight), kwargs)
    yield Call("fp32 weight", (x, gate, s.randn(16, dtype=torch.float32)), {"eps": 1e-5, "act": "silu"})


def output_gate(s: Setting) -> Iterator[Call]:
    x, gate = s.randn(s.num_tokens, 3, 16), s.randn(s.num_tokens, 3, 32, scale=3.0)
    for act in ("sigmoid", "silu"):
        yield Call(act, (x, gate[..., :16].contiguous()), {"act": act})
        # the second half of each head, as q_proj emits it
        yield Call(f"{act}, strided", (x, gate[..., 16:]), {"act": act})


def shared_gate(s: Setting) -> Iterator[Call]:
    yield Call("plain", (s.randn(s.num_tokens, 12), s.randn(s.num_tokens, 12), s.randn(1, 12)))
    yield Call("large", (s.randn(s.num_tokens, 12), s.randn(s.num_tokens, 12), s.randn(1, 12, scale=9.0)))


def linear(s: Setting) -> Iterator[Call]:
    x, weight = s.randn(s.num_tokens, 48), s.randn(20, 48, scale=0.2)
    yield Call("plain", (x, weight))
    yield Call("bias", (x, weight, s.randn(20)))


def embedding(s: Setting) -> Iterator[Call]:
    ids = torch.randint(0, 50, (s.num_tokens,), generator=s.gen).to(s.device)
    yield Call("int64", (ids, s.randn(50, 12)))
    yield Call("int32", (ids.int(), s.randn(50, 12)))


def rope(s: Setting) -> Iterator[Call]:
    inv_freq = (10000.0 ** -(torch.arange(4) / 4)).to(s.device)
    for layout in ("half", "interleave"):
        x = s.randn(s.num_tokens, 3, 12)
        yield Call(f"{layout}, partial", (x, s.rows.positions_T, inv_freq), {"layout": layout})
        kwargs = {"layout": layout, "attention_factor": 1.3}
        yield Call(f"{layout}, whole, scaled", (x[..., :8], s.rows.positions_T, inv_freq), kwargs)


def cache_write(s: Setting) -> Iterator[Call]:
    written = [start for start, _ in s.pairs]
    yield Call("latent", (s.randn(s.num_tokens, 12), s.paged((12,), written=written), s.rows))
    values = s.randn(s.num_tokens, 2, 3, 4)
    yield Call("kv", (values, s.paged((2, 3, 4), written=written), s.rows))
    yield Call("cast", (values, s.paged((2, 3, 4), written=written, dtype=torch.bfloat16), s.rows))


def attention(s: Setting) -> Iterator[Call]:
    for heads, kv_heads in ((4, 2), (3, 3), (4, 1)):
        q, kv = s.randn(s.num_tokens, heads, 16), s.paged((2, kv_heads, 16))
        yield Call(f"{heads}/{kv_heads} heads", (q, kv, s.rows), {"scaling": 0.25})
        for window in (1, 7, 64):
            yield Call(f"window {window}", (q, kv, s.rows), {"scaling": 0.25, "sliding_window": window})
        sinks = s.randn(heads, scale=2.0)
        yield Call("sinks", (q, kv, s.rows), {"scaling": 0.25, "sinks_N": sinks})
        kwargs = {"scaling": 0.25, "sinks_N": sinks, "sliding_window": 7}
        yield Call("sinks, window 7", (q, kv, s.rows), kwargs)


def mla(s: Setting) -> Iterator[Call]:
    for rope_dim in (4, 0):
        q_nope, q_rope = s.randn(s.num_tokens, 3, 8), s.randn(s.num_tokens, 3, rope_dim)
        args = (q_nope, q_rope, s.paged((16 + rope_dim,)), s.randn(3 * (8 + 6), 16, scale=0.25), s.rows)
        yield Call(f"rope dim {rope_dim}", args, {"scaling": 0.3, "v_head_dim": 6})


def sparse_mla(s: Setting) -> Iterator[Call]:
    for rope_dim in (4, 0):
        latent = s.paged((16 + rope_dim,))
        filled = torch.nonzero(~latent.flat()[:, 0].isnan())[:, 0].cpu()
        slots = torch.full((s.num_tokens, 9), -1, dtype=torch.int32)
        for t in range(s.num_tokens):
            # 0 .. 9 valid slots: none, some and all; -1 also in front of valid ones
            chosen = filled[torch.randperm(filled.numel(), generator=s.gen)[: t % 10]].int()
            slots[t, 9 - chosen.numel() if t % 3 == 0 else 0 :][: chosen.numel()] = chosen
        q_nope, q_rope = s.randn(s.num_tokens, 3, 8), s.randn(s.num_tokens, 3, rope_dim)
        args = (q_nope, q_rope, latent, slots.to(s.device), s.randn(3 * (8 + 6), 16, scale=0.25))
        yield Call(f"rope dim {rope_dim}", args, {"scaling": 0.3, "v_head_dim": 6})


def index_topk(s: Setting) -> Iterator[Call]:
    # 1, 3, 5 keys and many equal scores; topk 63 .. 65 around the rows of 63 and 64 tokens
    for pool, tail, topk in (
        (1, False, 1),
        (1, False, 5),
        (1, False, 63),
        (1, False, 64),
        (1, False, 65),
        (1, False, 200),
    ):
        yield _index_call(s, pool, tail, topk, heads=2)
    for pool, tail, topk in ((4, True, 4), (4, True, 12), (4, True, 64), (4, False, 12), (3, True, 8), (4, True, 3)):
        yield _index_call(s, pool, tail, topk, heads=2)
    yield _index_call(s, 1, False, 5, heads=1, zero_scores=True)
    yield _index_call(s, 4, True, 8, heads=1, chunk_tokens=7)


def _index_call(
    s: Setting, pool: int, tail: bool, topk: int, heads: int, zero_scores: bool = False, chunk_tokens: int = 64
) -> Call:
    q = s.integers(s.num_tokens, heads, 16)
    weights = s.integers(s.num_tokens, heads) * (0 if zero_scores else 0.5)
    keys = s.paged((16,), tokens_per_entry=pool, page=2 if pool > 1 else 8, integers=True)
    kwargs = {"topk": topk, "pool_size": pool, "always_tail": tail, "chunk_tokens": chunk_tokens}
    return Call(f"pool {pool}, tail {tail}, topk {topk}", (q, weights, keys, s.rows, s.paged((4,))), kwargs)


def index_pool(s: Setting) -> Iterator[Call]:
    for pool in (4, 3):
        written = [start // pool for start, _ in s.pairs]
        keys = s.paged((8,), tokens_per_entry=pool, page=3, written=written)
        args = (s.randn(s.num_tokens, 8), s.randn(s.num_tokens, 8), s.randn(pool, 8, dtype=torch.float32))
        yield Call(f"pool {pool}", (*args, s.state((pool, 2, 8)), keys, s.rows))


def short_conv(s: Setting) -> Iterator[Call]:
    x = s.randn(s.num_tokens, 12)
    for width, act in ((4, "silu"), (2, "silu"), (4, None)):
        weight = s.randn(12, width, dtype=torch.float32)
        yield Call(f"width {width}, {act}", (x, weight, s.state((width - 1, 12)), s.rows), {"act": act})
    yield Call("bias", (x, weight, s.state((3, 12)), s.rows), {"bias_C": s.randn(12)})
    yield Call(
        "fp32 bias", (x, weight, s.state((3, 12)), s.rows), {"bias_C": s.randn(12, dtype=torch.float32), "act": None}
    )


def decay_gate(s: Setting) -> Iterator[Call]:
    for form, bound in (("softplus", None), ("bounded", -5.0)):
        kwargs = {"form": form, "lower_bound": bound}
        z = s.randn(s.num_tokens, 3, 8, scale=10.0)
        yield Call(f"{form}, channel", (z, s.randn(3, dtype=torch.float32), s.randn(3, 8)), kwargs)
        a_log = s.randn(1, 1, 3, 1, dtype=torch.float32)
        yield Call(f"{form}, flat bias", (z, a_log, s.randn(24, dtype=torch.float32)), kwargs)
        yield Call(f"{form}, bias per head", (z, a_log, s.randn(3, dtype=torch.float32)), kwargs)
        yield Call(f"{form}, head", (z[..., 0], a_log, s.randn(3, dtype=torch.float32)), kwargs)


def delta_rule(s: Setting) -> Iterator[Call]:
    # decays from none to total, as trained models have both
    for name, k_heads, channel, strength in (
        ("channel", 4, True, 1.0),
        ("head", 2, False, 1.0),
        ("channel, shared keys", 2, True, 0.05),
        ("channel, strong", 4, True, 60.0),
        ("head, strong", 4, False, 60.0),
    ):
        q, k = s.randn(s.num_tokens, k_heads, 8), s.randn(s.num_tokens, k_heads, 8)
        v, beta = s.randn(s.num_tokens, 4, 6), s.randn(s.num_tokens, 4).sigmoid()
        shape = (s.num_tokens, 4, 8) if channel else (s.num_tokens, 4)
        g = -strength * s.randn(*shape, dtype=torch.float32).square()
        yield Call(name, (q, k, v, g, beta, s.state((4, 6, 8), torch.float32), s.rows))
        unit = (q * 8**-0.5, torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype))
        args = (*unit, v, g, beta, s.state((4, 6, 8), torch.float32), s.rows)
        yield Call(f"{name}, no l2norm", args, {"qk_l2norm": False})


def mamba2(s: Setting) -> Iterator[Call]:
    # decays from none to total, as trained models have both
    for name, groups, speed, dt_min in (
        ("one group", 1, 0.0, 0.0),
        ("two groups", 2, 0.0, 0.0),
        ("slow, floor of dt", 2, -6.0, 0.01),
        ("strong", 4, 4.0, 0.0),
    ):
        x, z = s.randn(s.num_tokens, 4, 6), s.randn(s.num_tokens, 4)
        b, c = s.randn(s.num_tokens, groups, 8), s.randn(s.num_tokens, groups, 8)
        a_log, dt_bias, skip = (s.randn(4, dtype=torch.float32) for _ in range(3))
        args = (x, z, b, c, a_log + speed, dt_bias + speed, skip, s.state((4, 6, 8), torch.float32), s.rows)
        yield Call(name, args, {"dt_min": dt_min})


def glu(s: Setting) -> Iterator[Call]:
    x = s.randn(s.num_tokens, 24, scale=3.0)
    yield Call("silu", (x,), {"kind": "silu"})
    yield Call("clamp", (x,), {"kind": "clamp", "limit": 2.0})
    yield Call("gelu_tanh", (x,), {"kind": "gelu_tanh"})


def activation(s: Setting) -> Iterator[Call]:
    yield Call("relu2", (s.randn(s.num_tokens, 24, scale=3.0),), {"kind": "relu2"})


def router(s: Setting) -> Iterator[Call]:
    for groups, kept in ((1, 1), (4, 2)):
        for score in ("sigmoid", "softmax"):
            for bias in (None, s.integers(16, dtype=torch.float32) / 8):
                kwargs = {"score": score, "top_k": 3, "num_groups": groups, "topk_groups": kept}
                # whole numbers: logits are exact, and experts and groups tie often
                args = (s.integers(s.num_tokens, 4, bound=1), s.integers(16, 4, bound=1), bias)
                name = f"{score}, {groups} groups, bias {bias is not None}"
                yield Call(name, args, kwargs | {"renorm": groups == 1, "scale": 2.5})


def experts(s: Setting) -> Iterator[Call]:
    scores = torch.rand(s.num_tokens, 6, generator=s.gen)
    ids = scores.argsort(1)[:, :3].int().to(s.device)
    args = (s.randn(s.num_tokens, 12), ids, torch.rand(s.num_tokens, 3, generator=s.gen).to(s.device))
    weights = (s.randn(6, 20, 12, scale=0.3), s.randn(6, 12, 10, scale=0.3))
    yield Call("silu", (*args, *weights), {"kind": "silu"})
    yield Call("clamp", (*args, *weights), {"kind": "clamp", "limit": 0.5})
    # too large to compute every expert for more than a few tokens
    wide = (s.randn(6, 1600, 12, scale=0.3), s.randn(6, 12, 800, scale=0.04))
    yield Call("wide", (*args, *wide), {"kind": "silu"})
    yield Call("gelu_tanh", (*args, *weights), {"kind": "gelu_tanh"})
    # no gate: the rows are up alone
    yield Call("relu2", (*args, s.randn(6, 10, 12, scale=0.3), weights[1]), {"kind": "relu2"})
    yield Call(
        "relu2, wide", (*args, s.randn(6, 1600, 12, scale=0.3), s.randn(6, 12, 1600, scale=0.04)), {"kind": "relu2"}
    )


def hyper_read(s: Setting) -> Iterator[Call]:
    for streams, iters in ((4, 20), (2, 1)):
        width = (2 + streams) * streams
        fn, base = s.randn(width, streams * 12, dtype=torch.float32, scale=0.3), s.randn(width, dtype=torch.float32)
        args = (s.randn(s.num_tokens, streams, 12), fn, base, s.randn(3, dtype=torch.float32))
        for eps in (1e-6, 1e-2):
            kwargs = {"sinkhorn_iters": iters, "eps": eps, "norm_eps": 1e-5}
            yield Call(f"{streams} streams, eps {eps}", args, kwargs)


def hyper_write(s: Setting) -> Iterator[Call]:
    post, comb = s.randn(s.num_tokens, 4, dtype=torch.float32), s.randn(s.num_tokens, 4, 4, dtype=torch.float32)
    yield Call("plain", (s.randn(s.num_tokens, 4, 12), s.randn(s.num_tokens, 12), post, comb))


def hyper_head(s: Setting) -> Iterator[Call]:
    yield Call("plain", (s.randn(s.num_tokens, 4, 12),))


MAKERS: dict[str, Callable[[Setting], Iterator[Call]]] = {
    maker.__name__: maker
    for maker in (
        rms_norm, layer_norm, gated_rms_norm, output_gate, shared_gate, linear, embedding, rope, cache_write,
        attention, mla, sparse_mla, index_topk, index_pool, short_conv, decay_gate, delta_rule, mamba2, glu, activation,
        router, experts, hyper_read, hyper_write, hyper_head,
    )
}  # fmt: skip
