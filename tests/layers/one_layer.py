"""One layer module with memory of its own, filled by name, run on two sequences in steps, compared with a truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tolerances import assert_close
from torch import Tensor, nn

from firstlight.layers.context import LayerContext, Ops, Scratch
from firstlight.layers.parameter import Module, targets
from firstlight.memory.arena import CachePool
from firstlight.memory.sequence import SequenceCache
from firstlight.ops.registry import operator_table
from firstlight.ops.rows import Rows
from firstlight.spec.caches import CacheDecl, CacheDtypes
from firstlight.spec.feedforward import GLU, MoE
from firstlight.spec.mixers import DeltaRule, GQAttention, Mamba2, MLAttention

Spec = GQAttention | MLAttention | DeltaRule | Mamba2 | GLU | MoE
Truth = Callable[[Tensor], Tensor]

TABLE = operator_table()
HIDDEN = 64
LENGTHS = (40, 12)
# tokens of either sequence in each step
STEPS = {
    "one shot": [(40, 12)],
    "one after the other": [(40, 0), (0, 12)],
    "23 + 17 beside 3 + 9": [(23, 3), (17, 9)],
    "39 + 1 beside 11 + 1": [(39, 11), (1, 1)],
}


def assert_computes(module: Module, spec: Spec, weights: Mapping[str, Tensor], truth: Truth) -> None:
    """Check a layer of these weights against the truth (x_TH of one sequence -> y_TH), in every way to step.

    Every body is tried. The layer must call the operators that its spec names, all of them and no other.
    """
    fill(module, weights)
    gen = torch.Generator().manual_seed(4)
    inputs = [torch.randn(n, HIDDEN, generator=gen) for n in LENGTHS]
    expected = [truth(x_TH) for x_TH in inputs]
    for body in ("ref", "eager"):
        called: set[str] = set()
        ops = Ops({name: recorded(name, TABLE[name].impl(body).load(), called) for name in TABLE.names()})
        for name, steps in STEPS.items():
            for found_TH, y_TH in zip(run(module, declared(spec), ops, inputs, steps), expected, strict=True):
                try:
                    assert_close(found_TH, y_TH)
                except AssertionError as failure:
                    raise AssertionError(f"{body}, {name}: {failure}") from failure
        assert called == set(spec.operators())


def fill(module: Module, weights: Mapping[str, Tensor]) -> None:
    """Write every part of every parameter. Fails where a name is left over on either side, or a shape differs."""
    parts = {target.name: target for target in targets(module)}
    assert set(parts) == set(weights)
    for name, target in parts.items():
        assert target.shape == weights[name].shape, name
        parameter = target.module.get_parameter(target.attribute)
        if parameter.is_meta:
            whole = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            parameter = nn.Parameter(whole, requires_grad=False)
            target.module.register_parameter(target.attribute, parameter)
        parameter[target.index] = weights[name]


def randomised(module: nn.Module, seed: int = 3) -> Any:
    """Return a module of transformers with random parameters and buffers, sums of about unit size.

    Any: attributes of a module are typed Tensor | Module.
    """
    gen = torch.Generator().manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
        tensor.data.copy_(torch.randn(tensor.shape, generator=gen) * scale)
    return module.requires_grad_(False).eval()


def declared(spec: Spec) -> CacheDecl:
    """Return the memory of a layer, in fp32."""
    return CacheDecl() if isinstance(spec, GLU | MoE) else spec.declare(CacheDtypes(kv="float32", index="float32"))


def run(
    module: Module, decl: CacheDecl, ops: Ops, inputs: Sequence[Tensor], steps: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Return the outputs of each sequence, fed in steps; a row per sequence, also where it has no token.

    What nobody wrote is NaN.
    """
    pool = CachePool((decl,), num_tokens=256, num_slots=len(inputs))
    for arena in (*pool.pages.values(), *pool.states.values()):
        arena.planes[0].fill_(float("nan"))
    sequences, starts = [SequenceCache(pool.blocks) for _ in inputs], [0] * len(inputs)
    pieces: list[list[Tensor]] = [[] for _ in inputs]
    for counts in steps:
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.reserve(end)
        rows = Rows.of(list(zip(starts, counts, strict=True)))
        cache = pool.views([sequence.hold(end) for sequence, end in zip(sequences, ends, strict=True)])[0]
        x_TH = torch.cat([x[start:end] for x, start, end in zip(inputs, starts, ends, strict=True)])
        y_TH = module(x_TH, LayerContext(ops, rows, cache, Scratch()))
        for piece, part in zip(pieces, torch.split(y_TH, list(counts)), strict=True):
            piece.append(part)
        starts = ends
    assert starts == [len(x) for x in inputs]
    return [torch.cat(piece) for piece in pieces]


def recorded(name: str, body: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    """Return the body, noting its name when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        return body(*args, **kwargs)

    return call
