"""Logits to token ids, each row by its own parameters and nothing else. R rows, V vocabulary, C rows that are cut.

The draw keeps no state: output token number i of a seed is drawn with one number that is a function of
the two. Weights are integers in fixed point, whose sums are exact in any order, so that a row gives the
same token in every batch and on every device with the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.engine.logits import SampleRow, process
from firstlight.engine.randomness import uniform
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError

__all__ = ["SampleRow", "Sampled", "SamplingParams", "TopLogprob", "kept_weights", "prompt_logprobs", "sample"]

BROKEN_LOGITS = "the model gave logits that are not finite numbers"
NOTHING_LEFT = "no token can be chosen: the parameters of the request leave none"
# rows are drawn so many logits at a time: bounds the fp64 and int64 copies, 128 MiB each
BLOCK_LOGITS = 2**24


class TopLogprob(NamedTuple):
    """A token with its log-probability and its place among all, 1 the likeliest; of equals the lower id first."""

    token: int
    logprob: float
    rank: int


class Sampled(NamedTuple):
    """The token chosen for a row, -1 where error says why there is none.

    logprob, rank, top: from the raw logits, None unless asked for. top: as many of the likeliest as
    asked for, by rank, and the chosen one at the end where it is not among them.
    """

    token: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] | None = None
    rank: int | None = None
    error: str | None = None


def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Return what is chosen for each row of raw logits. Ties of the likeliest go to the lowest id.

    A row whose logits are broken, or whose parameters leave no token, gets an error; the others do not notice.
    """
    if not rows:
        return []
    raw_RV = without_padding(logits_RV, [row.vocab_size for row in rows])
    processed_RV = process(raw_RV, rows)
    params = [row.params for row in rows]
    numbers = [0.0 if row.params.is_greedy else uniform(row.seed, row.num_output) for row in rows]
    tokens_R, chosen_R = _choose(processed_RV, params, numbers)
    if processed_RV is raw_RV:
        whole_R = chosen_R
    else:
        whole_R = raw_RV.amax(dim=-1).isfinite()
    # one transfer for all three
    tokens, chosen, whole = torch.stack([tokens_R, chosen_R.long(), whole_R.long()]).tolist()
    results = [
        Sampled(token) if ok and sound else Sampled(-1, error=NOTHING_LEFT if sound else BROKEN_LOGITS)
        for token, ok, sound in zip(tokens, chosen, whole, strict=True)
    ]
    asked = [i for i, p in enumerate(params) if p.logprobs is not None and results[i].error is None]
    if asked:
        counts = [params[i].logprobs or 0 for i in asked]
        entries = ranked(raw_RV[asked], [tokens[i] for i in asked], counts)
        for i, (own, top) in zip(asked, entries, strict=True):
            results[i] = Sampled(own.token, own.logprob, top, own.rank)
    return results


def without_padding(logits_RV: Tensor, vocab_sizes: Sequence[int]) -> Tensor:
    """Return fp32 logits without the rows of the head that are no token."""
    logits_RV = logits_RV[:, : max(vocab_sizes)].float()
    if min(vocab_sizes) == max(vocab_sizes):
        return logits_RV
    sizes_R1 = torch.tensor(vocab_sizes, device=logits_RV.device)[:, None]
    ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    return logits_RV.masked_fill(ids_V >= sizes_R1, -torch.inf)


def _choose(logits_RV: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the token of each row, and whether its likeliest logit is a finite number."""
    tokens_R = logits_RV.argmax(dim=-1)
    # argmax takes a NaN for the largest, so one look per row finds NaN, infinity and a row that is all forbidden
    chosen_R = logits_RV.gather(-1, tokens_R[:, None])[:, 0].isfinite()
    drawn = [index for index, p in enumerate(params) if not p.is_greedy]
    num_rows = max(1, BLOCK_LOGITS // logits_RV.shape[-1])
    for block in (drawn[start : start + num_rows] for start in range(0, len(drawn), num_rows)):
        weights_RV = kept_weights(logits_RV[block], [params[index] for index in block])
        tokens_R[block] = draw(weights_RV, [numbers[index] for index in block])
    return tokens_R, chosen_R


def kept_weights(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the weights int64 [R, V] that rows are drawn by: temperature, min_p, top_k, top_p, in this order.

    The likeliest token weighs a power of two, at most 2^52, such that no sum overflows; a token less
    likely than one unit is never drawn. Ties at a cut keep the lower ids.
    """
    temperature_R1, min_p_R1 = (
        torch.tensor([[value] for value in values], dtype=torch.float64, device=logits_RV.device)
        for values in ([p.temperature for p in params], [p.min_p for p in params])
    )
    unit = 2.0 ** min(52, 62 - logits_RV.shape[-1].bit_length())
    likeliest_R1 = logits_RV.amax(dim=-1, keepdim=True).double()
    shares_RV = ((logits_RV.double() - likeliest_R1) / temperature_R1).exp_()
    # a NaN fails the comparison too, and weighs nothing
    weights_RV = torch.where(shares_RV >= min_p_R1, shares_RV * unit, 0.0).long()
    cut = [index for index, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        weights_RV[cut] = _cut(logits_RV[cut], weights_RV[cut], [params[index] for index in cut])
    return weights_RV


def _cut(logits_CV: Tensor, weights_CV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size, device = logits_CV.shape[-1], logits_CV.device
    top_k_C1 = torch.tensor([[min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size] for p in params], device=device)
    top_p_C1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    # K of the likeliest: as many as any row can keep
    order_CK = likeliest(logits_CV, max(p.top_k if p.top_k > 0 else vocab_size for p in params))
    sorted_CK = weights_CV.gather(-1, order_CK)
    sorted_CK = torch.where(torch.arange(order_CK.shape[-1], device=device) < top_k_C1, sorted_CK, 0)
    sums_CK = sorted_CK.cumsum(dim=-1)
    # with top_p 1 rounding could cut the tail
    inside_CK = ((sums_CK - sorted_CK) < top_p_C1 * sums_CK[:, -1:]) | (top_p_C1 == 1)
    return torch.zeros_like(weights_CV).scatter_(-1, order_CK, torch.where(inside_CK, sorted_CK, 0))


def draw(weights_RV: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return one token id per row: the first, by id, at which the sum of weights passes number x total."""
    sums_RV = weights_RV.cumsum(dim=-1)
    numbers_R1 = torch.tensor(numbers, dtype=torch.float64, device=weights_RV.device)[:, None]
    # the largest number, 1 - 2^-53, takes at least half of a last place off the total: the product stays below it
    targets_R1 = (numbers_R1 * sums_RV[:, -1:]).long()
    tokens_R: Tensor = torch.searchsorted(sums_RV, targets_R1, right=True)[:, 0]
    return tokens_R


def prompt_logprobs(
    logits_TV: Tensor, next_ids: Sequence[int], count: int, *, vocab_size: int | None = None
) -> list[tuple[TopLogprob, ...]]:
    """Return, per raw logits of a prompt token, the entries of the token after it: the likeliest, and that one.

    As in Sampled.top; count: 0 that token only, -1 all. vocab_size: without it, no padding of the head.
    Raises: FirstlightError if the logits are broken.
    """
    if not next_ids:
        return []
    raw_TV = without_padding(logits_TV, [vocab_size or logits_TV.shape[-1]])
    if not bool(raw_TV.amax(dim=-1).isfinite().all()):
        raise FirstlightError(BROKEN_LOGITS, where="prompt_logprobs")
    return [top for _, top in ranked(raw_TV, next_ids, [count] * len(next_ids))]


Entries = tuple[TopLogprob, tuple[TopLogprob, ...]]


def ranked(logits_NV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Entries]:
    """Return, for each of N rows of raw logits, the entry of its token, and its top entries with that one."""
    num_rows = max(1, BLOCK_LOGITS // logits_NV.shape[-1])
    blocks = (slice(start, start + num_rows) for start in range(0, len(tokens), num_rows))
    return [found for at in blocks for found in _ranked_block(logits_NV[at], tokens[at], counts[at])]


def _ranked_block(logits_NV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Entries]:
    vocab_size, device = logits_NV.shape[-1], logits_NV.device
    tokens_N1 = torch.tensor(tokens, device=device)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    # a prompt may name padding of the head: behind every token, as it is never chosen
    own_N1, own_logprobs_N1 = (
        values_NV.gather(-1, tokens_N1.clamp(max=vocab_size - 1)).masked_fill(tokens_N1 >= vocab_size, -torch.inf)
        for values_NV in (logits_NV, logprobs_NV)
    )
    ids_V = torch.arange(vocab_size, device=device)
    ahead_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (ids_V < tokens_N1))
    ranks = (ahead_NV.sum(dim=-1) + 1).tolist()
    sizes = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    top_NK = likeliest(logits_NV, max(sizes))
    top_ids, top_logprobs = top_NK.tolist(), logprobs_NV.gather(-1, top_NK).tolist()
    for row, (token, logprob, rank) in enumerate(zip(tokens, own_logprobs_N1[:, 0].tolist(), ranks, strict=True)):
        own = TopLogprob(token, logprob, rank)
        found = zip(top_ids[row][: sizes[row]], top_logprobs[row], strict=False)
        top = tuple(TopLogprob(*entry, place) for place, entry in enumerate(found, start=1))
        yield own, top if rank <= sizes[row] else (*top, own)


def likeliest(logits_NV: Tensor, count: int) -> Tensor:
    """Return the ids [N, count] of the largest logits, at most all of them; of equals the lowest id comes first."""
    vocab_size = logits_NV.shape[-1]
    if count >= vocab_size:
        return logits_NV.sort(dim=-1, descending=True, stable=True).indices
    # torch.topk leaves the order of equals open. These keys are never equal: the logit's bits, as an integer
    # that orders as the number does (adding 0 makes -0 the same as 0), and below them the id, counted down
    bits_NV = (logits_NV + 0.0).view(torch.int32)
    ordered_NV = (bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)).long()
    keys_NV = ordered_NV * 2**32 + (2**32 - 1 - torch.arange(vocab_size, device=logits_NV.device))
    return 2**32 - 1 - (keys_NV.topk(count, dim=-1).values & (2**32 - 1))
