"""Each shape of an error is told by its likely cause, and no other shape is: pure functions of two tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firstlight.verify.hints import Known, Norming, explain

TOKENS, HEADS, DIM = 80, 4, 16
HEADED = Known(heads=(HEADS,))


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


THEIRS = seeded(TOKENS, HEADS * DIM)
NOISE = seeded(TOKENS, HEADS * DIM, seed=1)


def changed(where: Callable[[Tensor], Tensor], by: Tensor = NOISE) -> Tensor:
    """Return the reference's tensor with another one added where a mask of [T, N, D] holds."""
    mask = where(torch.zeros(TOKENS, HEADS, DIM)).flatten(1)
    return THEIRS + mask * by


def tokens(chosen: slice | list[int]) -> Callable[[Tensor], Tensor]:
    def mask(zeros: Tensor) -> Tensor:
        zeros[chosen] = 1
        return zeros

    return mask


def heads(chosen: list[int]) -> Callable[[Tensor], Tensor]:
    def mask(zeros: Tensor) -> Tensor:
        zeros[:, chosen] = 1
        return zeros

    return mask


def half_from_interleaved(x: Tensor) -> Tensor:
    """Put the even channels of a head first, then the odd ones."""
    return x.view(len(x), HEADS, DIM // 2, 2).transpose(-1, -2).flatten(1)


def interleaved_from_half(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, 2, DIM // 2).transpose(-1, -2).flatten(1)


def a_token_without_position() -> Tensor:
    """Turn all but the first token."""
    return changed(tokens(slice(1, None)))


def drifting() -> Tensor:
    return THEIRS + NOISE * torch.linspace(0.01, 1, TOKENS)[:, None]


def infinite(value: float) -> Tensor:
    ours = THEIRS.clone()
    ours[40:, 3] = value
    return ours


# ours, what is known, the hint
SHAPES: dict[str, tuple[Tensor, Known, str]] = {
    "equal": (THEIRS + 1e-6 * NOISE, HEADED, ""),
    "noise": (THEIRS + NOISE, HEADED, ""),
    "constant": (THEIRS / 2.5, HEADED,
                 "scaled by a constant: ours is 0.4 times the reference, a factor of 2.5 is missing"),
    "sign": (-THEIRS, HEADED, "the sign: ours is the reference times -1"),
    "zero": (THEIRS * 0, HEADED, "ours is zero everywhere"),
    "bias": (THEIRS + seeded(HEADS * DIM), HEADED,
             "the same vector is added in every row: a bias that one side lacks"),
    "a weight": (THEIRS * seeded(HEADS * DIM), HEADED,
                 "each channel is scaled by a constant of its own: a weight that differs"),
    "a row's factor": (THEIRS * seeded(TOKENS, 1), HEADED,
                       "each row is scaled by a factor of its own: a norm, or a gate with one value per token"),
    "half for interleaved": (half_from_interleaved(THEIRS), HEADED,
                             "channels are permuted as between the two rotary layouts: "
                             "ours half, the reference's interleaved"),
    "interleaved for half": (interleaved_from_half(THEIRS), HEADED,
                             "channels are permuted as between the two rotary layouts: "
                             "ours interleaved, the reference's half"),
    "permuted": (THEIRS.roll(1, dims=1), HEADED, "channels are permuted: 64 of 64 stand elsewhere"),
    "two swapped": (THEIRS[:, [1, 0, *range(2, HEADS * DIM)]], HEADED,
                    "channels are permuted: 2 of 64 stand elsewhere"),
    "one head": (changed(heads([2])), HEADED, "only heads 2 of 4 are wrong"),
    "one head in two": (changed(heads([1, 3])), HEADED, "only heads 1, 3 of 4 are wrong: every second one"),
    "channels of no head": (changed(heads([1, 2])), Known(), "only channels 16-47 of 64 are wrong"),
    "after the first chunk": (changed(tokens(slice(64, None))), HEADED,
                              "only from position 64 on, a multiple of 64: the state carried between chunks"),
    "after another chunk": (changed(tokens(slice(32, None))), Known(heads=(HEADS,), chunk=16),
                            "only from position 32 on, a multiple of 16: the state carried between chunks"),
    "behind a window": (changed(tokens(slice(48, None))), Known(heads=(HEADS,), window=48),
                        "right up to position 47: the edge of the window of 48 tokens"),
    "from somewhere": (changed(tokens(slice(17, None))), HEADED, "right up to position 16, wrong from there on"),
    "all but the first": (a_token_without_position(), HEADED,
                          "right at position 0 alone: what acts between tokens, such as rotation, decay or mask"),
    "a few tokens": (changed(tokens([5, 9, 70])), HEADED,
                     "only 3 of 80 tokens are wrong, the first at position 5, the last at 70"),
    "NaN": (infinite(float("nan")), HEADED, "ours holds NaN from position 40 on"),
    "infinity": (infinite(float("inf")), HEADED, "ours holds infinity from position 40 on"),
    "infinity, no positions": (infinite(float("inf")), Known(positions=False), "ours holds infinity"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_of_an_error_names_its_cause(shape: str) -> None:
    ours, known, hint = SHAPES[shape]
    assert explain(ours, THEIRS, known) == hint


@pytest.mark.parametrize("shape", SHAPES)
def test_precision_and_leading_dimensions_change_nothing(shape: str) -> None:
    ours, known, hint = SHAPES[shape]
    assert explain(ours.view(TOKENS, HEADS, DIM).double(), THEIRS.view(TOKENS, HEADS, DIM), known) == hint


def test_an_error_that_grows_with_the_position_is_told() -> None:
    hint = explain(drifting(), THEIRS, HEADED)
    assert hint.startswith("grows with position (r=0.")
    assert explain(drifting(), THEIRS, Known(positions=False)) == ""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(("ours", "theirs"), [(1e-6, 1e-5), (1e-5, 1e-6), (1e-6, 1e-8)])
def test_an_epsilon_is_measured(ours: float, theirs: float) -> None:
    """Rows as small as those of an embedding, where an epsilon counts."""
    x, weight = 0.02 * seeded(TOKENS, 64), 1 + 0.1 * seeded(64, seed=2)
    known = Known(norming=Norming(x=x, weight=weight, eps=ours))
    hint = explain(rms(x, weight, ours), rms(x, weight, theirs), known)
    assert hint == f"the norm's epsilon: ours is {ours:.0e}, the reference's about {theirs:.0e}"


def test_a_weight_about_zero_is_told_from_one_about_one() -> None:
    x, weight = seeded(TOKENS, 64), 0.1 * seeded(64, seed=2)
    known = Known(norming=Norming(x=x, weight=weight, eps=1e-6))
    plain, plus = rms(x, weight, 1e-6), rms(x, 1 + weight, 1e-6)
    assert explain(plain, plus, known) == "the norm's weight: ours multiplies by w, the reference by 1 + w"
    assert explain(plus, plain, known) == "the norm's weight: ours multiplies by 1 + w, the reference by w"


def test_the_epsilon_of_a_layer_norm_is_not_guessed() -> None:
    x, weight = 0.02 * seeded(TOKENS, 64), torch.ones(64)
    norming = Norming(x=x, weight=weight, eps=1e-6)
    pair = rms(x, weight, 1e-6), rms(x, weight, 1e-5)
    assert "epsilon" in explain(*pair, Known(norming=norming))
    assert "epsilon" not in explain(*pair, Known(norming=replace(norming, centred=True)))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (1, 64), (3, 2), (5, 1), (64,)])
def test_small_tensors_are_not_explained_away(shape: tuple[int, ...]) -> None:
    """Two tensors of noise have no simple relation; with few numbers any fit is chance."""
    ours, theirs = seeded(*shape), seeded(*shape, seed=1)
    hint = explain(ours, theirs)
    assert not any(word in hint for word in ("scaled", "bias", "permuted", "sign", "epsilon")), hint


def test_another_number_of_elements_is_not_explained() -> None:
    assert explain(seeded(4, 4), seeded(4, 5)) == ""
