"""What a reference chose in a layer - tokens by an index, experts by a router - and how ours compares.

Two right programs may choose differently where scores tie. Such a token is told from a fault by the scores behind the
choice, and what comes after the choice is then computed with the reference's, or a tie would look like an error of
the attention or of the experts. T tokens, K chosen, S entries, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.layers.context import Ops
from firstlight.layers.indexer import IndexLayer
from firstlight.layers.moe import RouterLayer
from firstlight.ops.paged.cache import Paged
from firstlight.ops.rows import Rows
from firstlight.verify.oracle import Trace

TIE = 1e-5
# exact as a double too, which padding goes through
NONE = 2**62


@dataclass(frozen=True, slots=True)
class Verdict:
    """tied, wrong: tokens that choose differently, by a tie or not. recall: share of the reference's choices found."""

    tied: tuple[int, ...]
    wrong: tuple[int, ...]
    recall: float


@dataclass(frozen=True, slots=True)
class Choices:
    """A reference's choices in one layer. selection_TK: positions, -1 where none; routing: weights and ids [T, K]."""

    selection_TK: Tensor | None = None
    routing: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, layer: nn.Module, trace: Trace) -> Choices:
        """Return what the calls of a trace chose, by the kind of our module that each belongs to."""
        selection, routing = None, None
        for path, module in layer.named_modules():
            call = trace.calls.get(path)
            if call is not None and isinstance(module, IndexLayer):
                selection = next((t for t in call.outputs if not t.is_floating_point() and t.ndim == 2), None)
            if call is not None and isinstance(module, RouterLayer):
                routing = weights_and_ids(call.outputs)
        return cls(selection, routing)

    def follow(self, ops: Ops, start: int = 0) -> Ops:
        """Return the bodies, choosing as the reference where scores tie. start: position of the first token."""
        bodies = dict(ops.bodies)
        if self.selection_TK is not None and "index_topk" in bodies:
            bodies["index_topk"] = following_selection(bodies["index_topk"], self.selection_TK, start)
        if self.routing is not None and "router" in bodies:
            bodies["router"] = following_routing(bodies["router"], *self.routing, start)
        return Ops(bodies)


def following_selection(body: Callable[..., Any], reference_TK: Tensor, start: int) -> Callable[..., Any]:
    """Return an index_topk body that selects the reference's entries where they tie with its own."""

    def call(q_TID: Tensor, weights_TI: Tensor, keys: Paged, rows: Rows, latent: Paged, **options: Any) -> Tensor:
        slots_TK: Tensor = body(q_TID, weights_TI, keys, rows, latent, **options)
        theirs_TK = visible(reference_TK[start : start + q_TID.shape[0]], rows)
        found = judge_selection(slots_TK, theirs_TK, q_TID, weights_TI, keys, rows, latent, **options)
        for t in found.tied:
            kept = theirs_TK[t][theirs_TK[t] >= 0]
            slots_TK[t] = -1
            slots_TK[t, : len(kept)] = latent.slots(torch.zeros_like(kept), kept).to(slots_TK.dtype)
        return slots_TK

    return call


def following_routing(
    body: Callable[..., Any], weights_TK: Tensor, ids_TK: Tensor, start: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a router body that takes the reference's experts where they tie with its own."""

    def call(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        ours_TK, mine_TK = body(x_TH, weight_EH, bias_E, **options)
        theirs = slice(start, start + x_TH.shape[0])
        for t in judge_routing(mine_TK, ids_TK[theirs], x_TH, weight_EH, bias_E, **options).tied:
            ours_TK[t], mine_TK[t] = weights_TK[theirs][t].to(ours_TK.dtype), ids_TK[theirs][t].to(mine_TK.dtype)
        return ours_TK, mine_TK

    return call


def judge_selection(
    slots_TK: Tensor,
    theirs_TK: Tensor,
    q_TID: Tensor,
    weights_TI: Tensor,
    keys: Paged,
    rows: Rows,
    latent: Paged,
    *,
    pool_size: int = 1,
    **options: Any,
) -> Verdict:
    """Return how a selection compares; the arguments after theirs_TK are those of index_topk."""
    mine_TK = sorted_sets(positions_of(slots_TK, latent))
    theirs_TK = sorted_sets(theirs_TK)
    width = max(mine_TK.shape[1], theirs_TK.shape[1])
    mine_TK, theirs_TK = (nn.functional.pad(x, (0, width - x.shape[1]), value=NONE) for x in (mine_TK, theirs_TK))
    differing = (mine_TK != theirs_TK).any(1).nonzero().flatten()
    missed = 0
    tied_tokens: list[int] = []
    wrong: list[int] = []
    if len(differing):
        scores_DS = index_scores(q_TID[differing], weights_TI[differing], keys, rows)
    for row, t in enumerate(differing.tolist()):
        mine, theirs = ({p for p in x[t].tolist() if p != NONE} for x in (mine_TK, theirs_TK))
        missed += len(theirs - mine)
        entries = [{position // pool_size for position in side} for side in (mine, theirs)]
        inside = max(entries[0] | entries[1], default=-1) < scores_DS.shape[1]
        (tied_tokens if inside and tied(scores_DS[row], *entries) else wrong).append(t)
    total = int((theirs_TK != NONE).sum())
    return Verdict(tuple(tied_tokens), tuple(wrong), 1 - missed / total if total else 1.0)


def judge_routing(
    mine_TK: Tensor, theirs_TK: Tensor, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, **options: Any
) -> Verdict:
    """Return how a routing compares; the arguments after theirs_TK are those of router."""
    mine, theirs = (sorted_sets(x.long()) for x in (mine_TK, theirs_TK))
    if mine.shape != theirs.shape:
        return Verdict((), tuple(range(len(mine))), 0.0)
    differing = (mine != theirs).any(1).nonzero().flatten()
    scores_DE = choice_scores(x_TH[differing], weight_EH, bias_E, **options)
    verdicts = [
        tied(scores_E, set(mine[t].tolist()), set(theirs[t].tolist()))
        for scores_E, t in zip(scores_DE, differing.tolist(), strict=True)
    ]
    tokens = differing.tolist()
    chosen = tuple(t for t, ok in zip(tokens, verdicts, strict=True) if ok)
    wrong = tuple(t for t, ok in zip(tokens, verdicts, strict=True) if not ok)
    return Verdict(chosen, wrong, 1 - len(differing) / max(1, len(mine)))


def tied(scores_S: Tensor, ours: set[int], theirs: set[int]) -> bool:
    """True if as many were chosen, and what only one side chose scores within TIE of each other."""
    only = sorted(ours ^ theirs)
    if len(ours) != len(theirs):
        return False
    values = scores_S[only]
    return not only or bool((values.max() - values.min()) <= TIE)


def index_scores(q_TID: Tensor, weights_TI: Tensor, keys: Paged, rows: Rows) -> Tensor:
    """Return fp32 scores [T, S] of the one row's entries, visible or not."""
    num_entries = (rows.starts[0] + rows.lengths[0]) // keys.tokens_per_entry
    k_SD = keys.read(0, num_entries).float()
    dots_TIS = torch.relu(torch.einsum("tid,sd->tis", q_TID.float(), k_SD) * q_TID.shape[-1] ** -0.5)
    return torch.einsum("tis,ti->ts", dots_TIS, weights_TI.float())


def choice_scores(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, *, score: str, **options: Any) -> Tensor:
    """Return the fp32 scores [T, E] that a router's choice is made on, before groups."""
    logits_TE = x_TH.float() @ weight_EH.float().T
    p_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else torch.softmax(logits_TE, dim=-1)
    return p_TE if bias_E is None else p_TE + bias_E


def positions_of(slots_TK: Tensor, latent: Paged) -> Tensor:
    """Return the positions behind physical slots of the one sequence, [T, K], -1 where there is none."""
    size = latent.entries_per_page
    page_of = torch.full((latent.data.shape[0],), -1, dtype=torch.int64)
    page_of[latent.table_RN[0].long()] = torch.arange(latent.table_RN.shape[1])
    slots = slots_TK.long()
    return torch.where(slots >= 0, page_of[slots.clamp(min=0) // size] * size + slots % size, -1)


def visible(positions_TK: Tensor, rows: Rows) -> Tensor:
    """Return a reference's selection without the later tokens that it lists where it has too few."""
    return torch.where(positions_TK <= rows.positions_T[:, None], positions_TK.long(), -1)


def sorted_sets(numbers_TK: Tensor) -> Tensor:
    """Return rows of numbers ascending, what is negative as NONE at the end."""
    return torch.where(numbers_TK < 0, NONE, numbers_TK).sort(dim=1).values


def weights_and_ids(outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the pair of equal shape, one floating and one not, among the results of a router."""
    ids = [t for t in outputs if not t.is_floating_point()]
    pairs = [(w, i) for i in ids for w in outputs if w.is_floating_point() and w.shape == i.shape]
    return pairs[0] if pairs else None
