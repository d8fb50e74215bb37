"""What the shape of an error says about its cause: a pure function of two tensors.

Each test fits one explanation and speaks only where it leaves next to nothing of the error. T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# an error at or below this share of the reference's magnitude is none; see TOLERANCE of verify
FLOOR = 1e-5
# an explanation may leave this share of the error
LEFT = 1e-3
# columns compared with each other when a permutation is looked for
MOST_CHANNELS = 1024
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Norming:
    """What is known where a norm differs. x: its input, rows as those of the output; centred: a layer norm."""

    x: Tensor
    weight: Tensor
    eps: float
    centred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known about a pair of tensors. heads: numbers of heads that the channels may be split into.

    positions: the rows are tokens, from position 0 on. chunk: grid of a scan. window: tokens that attention sees.
    """

    heads: tuple[int, ...] = ()
    positions: bool = True
    chunk: int = CHUNK
    window: int | None = None
    norming: Norming | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """ours and theirs in double, [T, C]."""

    ours: Tensor
    theirs: Tensor

    @property
    def gap(self) -> Tensor:
        return self.ours - self.theirs

    @property
    def floor(self) -> float:
        return FLOOR * float(self.theirs.abs().max())

    def explained(self, guess: Tensor) -> bool:
        """True if ours is the guess, up to the order of summation."""
        left = float((self.ours - guess).abs().max())
        return left <= max(self.floor, LEFT * float(self.gap.abs().max()))


def explain(ours: Tensor, theirs: Tensor, known: Known | None = None) -> str:
    """Return what turns the reference's tensor into ours, "" if nothing simple does. Shapes [T, ...] or [C]."""
    known = known or Known()
    if not ours.numel() or ours.numel() != theirs.numel():
        return ""
    ours, theirs = (x.detach().double().reshape(theirs.shape) for x in (ours, theirs))
    pair = _Pair(*(x.flatten(1) if x.ndim > 1 else x[:, None] for x in (ours, theirs)))
    broken = _not_finite(pair, known)
    if broken or float(pair.gap.abs().max()) <= pair.floor:
        return broken
    tests: tuple[Callable[[_Pair, Known], str], ...] = (
        _constant,
        _offset,
        _norm_weight,
        _epsilon,
        _rows_scaled,
        _permuted,
        _heads,
        _where,
        _growth,
    )
    return next(filter(None, (test(pair, known) for test in tests)), "")


def _not_finite(pair: _Pair, known: Known) -> str:
    for name, x in (("ours", pair.ours), ("the reference", pair.theirs)):
        bad = ~torch.isfinite(x).all(1)
        if bad.any():
            kind = "NaN" if torch.isnan(x).any() else "infinity"
            at = f" from position {int(bad.nonzero()[0])} on" if known.positions else ""
            return f"{name} holds {kind}{at}"
    return ""


def _constant(pair: _Pair, known: Known) -> str:
    """One factor for all, or ours all zero."""
    square = float((pair.theirs**2).sum())
    if not bool(pair.ours.any()):
        return "ours is zero everywhere"
    if not square or pair.theirs.numel() < 4:
        return ""
    factor = float((pair.ours * pair.theirs).sum()) / square
    if not factor or not pair.explained(factor * pair.theirs):
        return ""
    if abs(factor + 1) < 1e-4:
        return "the sign: ours is the reference times -1"
    return f"scaled by a constant: ours is {factor:.4g} times the reference, a factor of {1 / factor:.4g} is missing"


def _offset(pair: _Pair, known: Known) -> str:
    """One vector added in every row."""
    if len(pair.ours) < 4:
        return ""
    if pair.explained(pair.theirs + pair.gap.mean(0)):
        return "the same vector is added in every row: a bias that one side lacks"
    return ""


def _norm_weight(pair: _Pair, known: Known) -> str:
    """One factor per channel; of a norm, w against 1 + w."""
    if len(pair.ours) < 4 or pair.theirs.shape[1] < 2:
        return ""
    square_C = (pair.theirs**2).sum(0)
    factor_C = (pair.ours * pair.theirs).sum(0) / square_C.clamp(min=torch.finfo(torch.float64).tiny)
    if not pair.explained(factor_C * pair.theirs):
        return ""
    if known.norming is not None and len(known.norming.weight) == len(factor_C):
        w_C = known.norming.weight.detach().double()
        for ours, theirs, text in ((w_C, 1 + w_C, ("w", "1 + w")), (1 + w_C, w_C, ("1 + w", "w"))):
            if pair.explained(pair.theirs * ours / theirs):
                return f"the norm's weight: ours multiplies by {text[0]}, the reference by {text[1]}"
    return "each channel is scaled by a constant of its own: a weight that differs"


def _row_factors(pair: _Pair) -> Tensor | None:
    """Return [T, 1], if each row is the reference's times a factor of its own."""
    if pair.theirs.shape[1] < 4 or len(pair.theirs) < 4:
        return None
    square_T = (pair.theirs**2).sum(1, keepdim=True)
    factor_T1 = (pair.ours * pair.theirs).sum(1, keepdim=True) / square_T.clamp(min=torch.finfo(torch.float64).tiny)
    return factor_T1 if pair.explained(factor_T1 * pair.theirs) else None


def _epsilon(pair: _Pair, known: Known) -> str:
    """ours / theirs = sqrt((ms + theirs' eps) / (ms + ours'))."""
    norm = known.norming
    if norm is None or norm.x.numel() != pair.ours.numel():
        return ""
    x = norm.x.detach().double().reshape(-1, norm.x.shape[-1])
    rows = _Pair(pair.ours.reshape(x.shape), pair.theirs.reshape(x.shape))
    # the affine bias of a layer norm would hide the factor
    if norm.centred:
        return ""
    square_R = (rows.theirs**2).sum(1)
    keep_R = square_R > 0
    factor_R = ((rows.ours * rows.theirs).sum(1) / square_R)[keep_R]
    mean_R = (x**2).mean(1)[keep_R]
    if len(factor_R) < 4:
        return ""
    # rounding of a row's factor moves its estimate by about 1e-7 of the mean square: small rows know best
    weight_R = 1 / (mean_R + norm.eps) ** 2
    estimate = float(((factor_R**2 * (mean_R + norm.eps) - mean_R) * weight_R).sum() / weight_R.sum())
    if estimate < 0:
        return ""
    guess = torch.ones(len(x), dtype=torch.float64)
    guess[keep_R] = ((mean_R + estimate) / (mean_R + norm.eps)).sqrt()
    left = float((rows.ours - guess[:, None] * rows.theirs).abs().max())
    # the factors differ by parts in 1e5: what they leave is rounding, a few parts in 1e7
    if left > 0.1 * float(rows.gap.abs().max()) or abs(estimate - norm.eps) < 0.2 * norm.eps:
        return ""
    return f"the norm's epsilon: ours is {norm.eps:.0e}, the reference's about {estimate:.0e}"


def _rows_scaled(pair: _Pair, known: Known) -> str:
    if _row_factors(pair) is None:
        return ""
    return "each row is scaled by a factor of its own: a norm, or a gate with one value per token"


def _permuted(pair: _Pair, known: Known) -> str:
    """The reference's channels in another order."""
    tokens, channels = pair.theirs.shape
    if tokens < 4 or not 4 <= channels <= MOST_CHANNELS:
        return ""
    # column j of ours is column order[j] of the reference
    order = torch.cdist(pair.ours.T.contiguous(), pair.theirs.T.contiguous()).argmin(1)
    if len(set(order.tolist())) < channels or not pair.explained(pair.theirs[:, order]):
        return ""
    for heads in dict.fromkeys((*known.heads, 1)):
        if channels % heads == 0 and (pairs := _rotary_order(order, channels // heads)):
            return f"channels are permuted as between the two rotary layouts: {pairs}"
    moved = int((order != torch.arange(channels)).sum())
    return f"channels are permuted: {moved} of {channels} stand elsewhere"


def _rotary_order(order: Tensor, dim: int) -> str:
    if dim % 2:
        return ""
    even_odd = torch.arange(dim).view(-1, 2).T.flatten()
    starts = torch.arange(0, len(order), dim)[:, None]
    if torch.equal(order, (starts + even_odd).flatten()):
        return "ours half, the reference's interleaved"
    back = torch.equal(order, (starts + even_odd.argsort()).flatten())
    return "ours interleaved, the reference's half" if back else ""


def _heads(pair: _Pair, known: Known) -> str:
    """Some heads right, the others wrong."""
    channels = pair.theirs.shape[1]
    for heads in known.heads:
        if heads < 2 or channels % heads:
            continue
        wrong_N = pair.gap.abs().view(-1, heads, channels // heads).amax((0, 2)) > pair.floor
        wrong = wrong_N.nonzero().flatten().tolist()
        if 0 < len(wrong) < heads:
            return f"only heads {', '.join(map(str, wrong))} of {heads} are wrong{_every_other(wrong, heads)}"
    wrong_C = pair.gap.abs().amax(0) > pair.floor
    first, count = int(wrong_C.nonzero()[0]), int(wrong_C.sum())
    if count <= 0.75 * channels and bool(wrong_C[first : first + count].all()):
        return f"only channels {first}-{first + count - 1} of {channels} are wrong"
    return ""


def _every_other(wrong: Sequence[int], heads: int) -> str:
    every_other = (list(range(0, heads, 2)), list(range(1, heads, 2)))
    return ": every second one" if heads > 2 and list(wrong) in every_other else ""


def _where(pair: _Pair, known: Known) -> str:
    """Right up to some position."""
    if not known.positions or len(pair.ours) < 4:
        return ""
    wrong_T = pair.gap.abs().amax(1) > pair.floor
    first, count, total = int(wrong_T.nonzero()[0]), int(wrong_T.sum()), len(wrong_T)
    last = int(wrong_T.nonzero()[-1])
    if known.window and first and abs(first - known.window) <= 1:
        return f"right up to position {first - 1}: the edge of the window of {known.window} tokens"
    # a lone survivor of a real cut is rare; a cut is where nothing is wrong before and most is after
    if first and count >= 0.75 * (total - first):
        if known.chunk > 1 and first % known.chunk == 0:
            return f"only from position {first} on, a multiple of {known.chunk}: the state carried between chunks"
        if first == 1:
            return "right at position 0 alone: what acts between tokens, such as rotation, decay or mask"
        return f"right up to position {first - 1}, wrong from there on"
    if count <= 0.25 * total:
        return f"only {count} of {total} tokens are wrong, the first at position {first}, the last at {last}"
    return ""


def _growth(pair: _Pair, known: Known) -> str:
    """An error that follows the position."""
    error_T = pair.gap.abs().amax(1)
    if not known.positions or len(error_T) < 16 or float(error_T.std()) == 0:
        return ""
    positions = torch.arange(len(error_T), dtype=torch.float64)
    r = float(torch.corrcoef(torch.stack((positions, error_T)))[0, 1])
    quarter = len(error_T) // 4
    ratio = float(error_T[-quarter:].mean()) / max(float(error_T[:quarter].mean()), torch.finfo(torch.float64).tiny)
    if r < 0.5 or ratio < 2:
        return ""
    return f"grows with position (r={r:.2f}): rotary frequencies, a decay, or a state that is carried wrong"
