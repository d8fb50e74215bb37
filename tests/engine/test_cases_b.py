"""Faults seen in other engines, restated: chunked prefill, the convolution window, scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import HYBRIDS, assert_solo, engine_of, greedy, prompt, run, solo_runner
from tolerances import assert_close

from firstlight.engine.runner import Row, Runner
from firstlight.memory.sequence import SequenceCache
from firstlight.ops.registry import OperatorTable
from firstlight.ops.rows import Rows

Tiny = Callable[[str], Path]
hybrids = pytest.mark.parametrize("name", HYBRIDS)
# scan chunk and convolution width of the tiny models
CHUNK, WIDTH = 64, 4
# absolute, on logits of standard deviation 0.4 and hidden states of about 1
TOLERANCE = 2e-5


def run_pieces(
    runner: Runner, ids: Sequence[int], pieces: Sequence[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of all tokens, fed in pieces, and the states they end in."""
    sequence, start, found = SequenceCache(runner.pool.blocks), 0, []
    try:
        for n in pieces:
            found.append(runner.run(sequence, ids[start : start + n], all_logits=True))
            start += n
        assert start == len(ids)
        return torch.cat(found), states(runner, sequence.slot)
    finally:
        sequence.release()


def states(runner: Runner, slot: int) -> dict[str, torch.Tensor]:
    """Return a copy of every state in a slot."""
    arenas = runner.pool.states.items()
    return {f"{name} {layer}": plane[slot].clone() for name, arena in arenas for layer, plane in arena.planes.items()}


def assert_equal_runs(runner: Runner, ids: Sequence[int], pieces: Sequence[int], other: Sequence[int]) -> None:
    """Compare logits and end states of the same tokens in different pieces."""
    logits, ends = run_pieces(runner, ids, pieces)
    expected, expected_ends = run_pieces(runner, ids, other)
    assert (logits - expected).abs().max() <= TOLERANCE
    for name, value in ends.items():
        assert_close(value, expected_ends[name])


@hybrids
def test_b1_a_tail_shorter_than_the_scan_chunk_ends_in_the_right_state(name: str, tiny: Tiny) -> None:
    runner = solo_runner(tiny(name))
    ids, lengths = prompt(2 * CHUNK + 1), [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1]
    sequence, ends, logits = SequenceCache(runner.pool.blocks), {}, []
    for length, token in enumerate(ids, start=1):
        logits.append(runner.run(sequence, [token]))
        if length in lengths:
            ends[length] = states(runner, sequence.slot)
    sequence.release()
    for length in lengths:
        found, found_ends = run_pieces(runner, ids[:length], [length])
        assert (found - torch.cat(logits[:length])).abs().max() <= TOLERANCE
        for key, value in found_ends.items():
            # the ring of a pool has a cell per token; those before the first token hold anything
            valid = slice(length) if key.startswith("index_tail") else slice(None)
            assert_close(value[valid], ends[length][key][valid])


@pytest.mark.parametrize("pieces", [[9, 5], [9, 5, 1, 1], [1, 13], [13, 1]], ids=str)
@hybrids
def test_b2_several_tokens_on_top_of_a_state_are_all_computed(name: str, pieces: list[int], tiny: Tiny) -> None:
    ids = prompt(sum(pieces))
    assert_equal_runs(solo_runner(tiny(name)), ids, pieces, [len(ids)])


def layer_outputs(runner: Runner, ids: Sequence[int], pieces: Sequence[int]) -> list[torch.Tensor]:
    """Return what leaves each layer, for all tokens."""
    seen: list[list[torch.Tensor]] = [[] for _ in runner.model.layers]
    handles = [
        layer.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out.clone()))
        for layer, kept in zip(runner.model.layers, seen, strict=True)
    ]
    try:
        run_pieces(runner, ids, pieces)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.cat(kept) for kept in seen]


@pytest.mark.parametrize("pieces", [[16] * 4, [21, 21, 21, 1], [1, 63], [40, 24]], ids=str)
@pytest.mark.parametrize("name", [*HYBRIDS, "deepseek_v32"])
def test_b4_every_layer_of_a_later_chunk_is_that_of_one_shot(name: str, pieces: list[int], tiny: Tiny) -> None:
    runner, ids = solo_runner(tiny(name)), prompt(64)
    pairs = zip(layer_outputs(runner, ids, pieces), layer_outputs(runner, ids, [64]), strict=True)
    wrong = [index for index, (found, expected) in enumerate(pairs) if (found - expected).abs().max() > TOLERANCE]
    assert not wrong, f"the first layer that differs is {wrong[0]}"


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("length", range(1, WIDTH + 2))
def test_b5_a_window_may_span_chunks_shorter_than_itself(length: int, chunk: int, tiny: Tiny) -> None:
    runner, ids = solo_runner(tiny("kimi_linear")), prompt(length)
    pieces = [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
    assert_equal_runs(runner, ids, pieces, [length])


@hybrids
def test_b5_prompts_shorter_than_the_window_in_one_batch(name: str, tiny: Tiny) -> None:
    engine = engine_of(tiny(name), max_num_batched_tokens=8)
    assert_solo(tiny(name), run(engine, [prompt(length, length) for length in range(1, WIDTH + 2)], greedy(5)))


@pytest.mark.parametrize("lengths", [[5, 0, 7], [0, 3], [3, 0], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("name", [*HYBRIDS, "qwen3_moe"])
def test_b6_an_empty_row_keeps_its_state_and_disturbs_nobody(name: str, lengths: list[int], tiny: Tiny) -> None:
    runner = solo_runner(tiny(name))
    alone = [run_pieces(runner, prompt(9 + n, n), [9, n])[0][9:] if n else None for n in lengths]
    runner = engine_of(tiny(name)).runner
    sequences = [SequenceCache(runner.pool.blocks) for _ in lengths]
    for sequence, n in zip(sequences, lengths, strict=True):
        runner.run(sequence, prompt(9 + n, n)[:9])
        sequence.reserve(9 + n)
    before = [states(runner, sequence.slot) for sequence in sequences]
    rows = [Row(sequence.hold(9 + n), 9, prompt(9 + n, n)[9:]) for sequence, n in zip(sequences, lengths, strict=True)]
    with torch.inference_mode():
        hidden_TH, step = runner.forward(rows)
        logits = runner.model.logits(hidden_TH, step.model_ops).split(lengths)
    for sequence, n, found, expected, old in zip(sequences, lengths, logits, alone, before, strict=True):
        if n:
            assert (found - expected).abs().max() <= TOLERANCE
        else:
            assert all(torch.equal(old[key], value) for key, value in states(runner, sequence.slot).items())


@pytest.mark.parametrize("name", [*HYBRIDS, "deepseek_v32", "qwen3_moe"])
def test_b7_tokens_behind_the_last_row_are_refused(name: str, tiny: Tiny) -> None:
    runner = solo_runner(tiny(name))
    sequence = SequenceCache(runner.pool.blocks)
    try:
        sequence.reserve(5)
        step = runner.bound.step(Rows.of([(0, 5)]), runner.pool.views([sequence.hold(5)]))
        for length in (4, 8):
            with pytest.raises((RuntimeError, IndexError, ValueError)), torch.inference_mode():
                runner.model(torch.tensor(prompt(length)), step)
    finally:
        sequence.release()


@pytest.mark.parametrize("body", ["ref", "eager"])
@pytest.mark.parametrize(("form", "bound"), [("softplus", None), ("bounded", -5.0)])
def test_b8_the_decay_is_the_formula_of_the_config(
    form: str, bound: float | None, body: str, table: OperatorTable
) -> None:
    gate: Any = table["decay_gate"].impl(body).load()
    z_THK = torch.tensor([-60.0, -3.0, 0.0, 2.0]).view(1, 2, 2)
    A_log, dt_bias = torch.tensor([-1.0, 0.5]), torch.tensor([0.1, -0.2, 0.3, 0.4])
    found = gate(z_THK, A_log, dt_bias, form=form, lower_bound=bound).flatten().tolist()
    for index, (z, bias, value) in enumerate(zip(z_THK.flatten().tolist(), dt_bias.tolist(), found, strict=True)):
        rate, x = math.exp(A_log[index // 2].item()), z + bias
        softplus = -rate * math.log1p(math.exp(x))
        expected = softplus if bound is None else bound / (1 + math.exp(-rate * x))
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("body", ["ref", "eager"])
def test_b8_a_form_without_its_parameter_is_refused(body: str, table: OperatorTable) -> None:
    gate: Any = table["decay_gate"].impl(body).load()
    inputs = torch.zeros(1, 2, 2), torch.zeros(2), torch.zeros(4)
    for form in ("bounded", "sigmoid"):
        with pytest.raises(ValueError, match="form"):
            gate(*inputs, form=form)
