"""What a request's parameters do to its logits before a token is chosen. R rows, V vocabulary, N some ids.

Order, as in vLLM: allowed ids, bad words, min_tokens, logit_bias, penalties. Temperature and the cuts
(min_p, top_k, top_p) belong to the draw.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """A request at the moment its next token is chosen.

    ids: prompt, then output; only the first `known` count. extra: one more output token, sampled in
    the step before and not yet in ids. eos_ids: end a text. seed: that of the request, already drawn
    where it gave none. vocab_size: ids from here on are padding of the head, never chosen.
    """

    params: SamplingParams
    ids: Sequence[int]
    num_prompt: int
    known: int
    seed: int
    vocab_size: int
    extra: int | None = None
    eos_ids: Collection[int] = ()

    @property
    def num_output(self) -> int:
        """Output tokens so far, which is the index of the one that is chosen next."""
        return self.known - self.num_prompt + (self.extra is not None)

    def tokens(self, start: int) -> list[int]:
        """Return the tokens from a position on, the newest included."""
        return [*self.ids[start : self.known], *(() if self.extra is None else (self.extra,))]


def process(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return the logits [R, V] to choose from: new where a row changes any, else the same tensor."""
    changed = [index for index, row in enumerate(rows) if row.params.changes_logits]
    if not changed:
        return logits_RV
    processed_RV = logits_RV.clone()
    for index in changed:
        process_row(processed_RV[index], rows[index])
    return processed_RV


def process_row(logits_V: Tensor, row: SampleRow) -> None:
    """Change one row's logits in place."""
    params = row.params
    if params.allowed_token_ids is not None:
        allow(logits_V, params.allowed_token_ids)
    banned = bad_word_ends(row)
    if row.num_output < params.min_tokens:
        banned |= params.ending_ids(row.eos_ids)
    if banned:
        logits_V[known_ids(logits_V, sorted(banned))] = -math.inf
    if params.logit_bias:
        bias_N = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=logits_V.device)
        logits_V[torch.tensor(list(params.logit_bias), device=logits_V.device)] += bias_N
    if params.repetition_penalty != 1:
        penalise_seen(logits_V, row.tokens(0), params.repetition_penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        penalise_output(logits_V, row.tokens(row.num_prompt), params.presence_penalty, params.frequency_penalty)


def allow(logits_V: Tensor, ids: Sequence[int]) -> None:
    """Forbid, in place, every token but ids."""
    ids_N = known_ids(logits_V, ids)
    allowed_N = logits_V[ids_N]
    logits_V.fill_(-math.inf)
    logits_V[ids_N] = allowed_N


def bad_word_ends(row: SampleRow) -> set[int]:
    """Return the ids that would complete a bad word: its last, where the output ends in the rest of it."""
    words = row.params.bad_words_ids
    longest = max((len(word) for word in words), default=1) - 1
    tail = row.tokens(max(row.num_prompt, row.known - longest))
    return {word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == list(word[:-1])}


def penalise_seen(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> None:
    """Make, in place, each token that occurs less likely: positive logits divided, negative ones multiplied."""
    ids_N = torch.unique(known_ids(logits_V, tokens))
    seen_N = logits_V[ids_N]
    logits_V[ids_N] = torch.where(seen_N > 0, seen_N / penalty, seen_N * penalty)


def penalise_output(logits_V: Tensor, tokens: Sequence[int], presence: float, frequency: float) -> None:
    """Subtract, in place, presence from each token that occurs, and frequency per occurrence."""
    ids_N, counts_N = torch.unique(known_ids(logits_V, tokens), return_counts=True)
    logits_V[ids_N] -= presence + frequency * counts_N


def known_ids(logits_V: Tensor, ids: Sequence[int]) -> Tensor:
    """Return those ids that have a logit: a prompt or a configuration may name padding of the head."""
    ids_N = torch.tensor(ids, dtype=torch.int64, device=logits_V.device)
    return ids_N[ids_N < logits_V.shape[0]]
