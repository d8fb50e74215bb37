"""Index branch of sparse attention, plain torch: scores in chunks of tokens, selection without a sort.

Letters as in ref.py; S index entries of a row, n tokens of a row, c tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.paged.cache import Paged, State
from firstlight.ops.rows import Rows


def index_topk(
    q_TID: Tensor,
    weights_TI: Tensor,
    keys: Paged,
    rows: Rows,
    latent: Paged,
    *,
    topk: int,
    pool_size: int = 1,
    always_tail: bool = False,
    chunk_tokens: int = 64,
) -> Tensor:
    """Return the kept tokens as physical slots of the latent cache, int32 [T, topk (+ P - 1 with a tail)].

    Ascending by position, -1 pads at the end. chunk_tokens bounds the workspace and changes no result.
    """
    width = topk + (pool_size - 1 if always_tail else 0)
    slots = torch.full((q_TID.shape[0], width), -1, dtype=torch.int32, device=q_TID.device)
    for row, start, n, tokens in rows.spans():
        # entries past the row's last token do not exist, so a chunk reads no more than it can see
        k_SD = keys.read(row, (start + n) // pool_size).float()
        for begin in range(0, n, chunk_tokens):
            stop = min(n, begin + chunk_tokens)
            cut = slice(tokens.start + begin, tokens.start + stop)
            positions_c = torch.arange(start + begin, start + stop, device=q_TID.device)
            score_cS = _scores(q_TID[cut], weights_TI[cut], k_SD[: (start + stop) // pool_size])
            kept_cS = _best(score_cS, (positions_c + 1) // pool_size, topk // pool_size)
            kept_cs = _expand(kept_cS, positions_c, pool_size, always_tail)
            slots[cut] = _pack(kept_cs, row, latent, width)
    return slots


def _scores(q_cID: Tensor, weights_cI: Tensor, k_SD: Tensor) -> Tensor:
    dots_cIS = (q_cID.float() @ k_SD.transpose(0, 1)).mul_(q_cID.shape[2] ** -0.5).relu_()
    return (weights_cI.float()[:, None] @ dots_cIS)[:, 0]


def _best(score_cS: Tensor, visible_c: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` best visible entries, fewer if fewer are visible; ties keep the smaller entry."""
    visible_cS = torch.arange(score_cS.shape[1], device=score_cS.device) < visible_c[:, None]
    if count >= score_cS.shape[1]:
        return visible_cS
    if count == 0:
        return torch.zeros_like(visible_cS)
    score_cS = score_cS.masked_fill(~visible_cS, float("-inf"))
    # topk alone leaves the choice among equal scores open, so only its last value is used
    edge_c1 = score_cS.topk(count, dim=1).values[:, -1:]
    above, level = score_cS > edge_c1, score_cS == edge_c1
    room_c1 = count - above.sum(1, keepdim=True)
    return (above | (level & (level.cumsum(1) <= room_c1))) & visible_cS


def _expand(kept_cS: Tensor, positions_c: Tensor, pool_size: int, always_tail: bool) -> Tensor:
    """Return the mask over tokens from a mask over entries, with the open pool added."""
    if pool_size == 1:
        return kept_cS
    kept_cs = torch.nn.functional.pad(kept_cS.repeat_interleave(pool_size, dim=1), (0, pool_size))
    if not always_tail:
        return kept_cs
    token_s = torch.arange(kept_cs.shape[1], device=kept_cs.device)
    first_c = (positions_c + 1) // pool_size * pool_size
    return kept_cs | ((token_s >= first_c[:, None]) & (token_s <= positions_c[:, None]))


def _pack(kept_cs: Tensor, row: int, latent: Paged, width: int) -> Tensor:
    """Return the kept tokens of each line as slots [c, width], in order, -1 behind."""
    # what is not kept goes to a last column that is cut off: no sync, no sort
    column_cs = torch.where(kept_cs, kept_cs.cumsum(1) - 1, width)
    token_s = torch.arange(kept_cs.shape[1], device=kept_cs.device)
    packed = torch.full((kept_cs.shape[0], width + 1), -1, dtype=torch.int64, device=kept_cs.device)
    packed = packed.scatter_(1, column_cs, token_s.expand_as(column_cs))[:, :width]
    slots = latent.slots(torch.full_like(packed, row), packed.clamp(min=0))
    return torch.where(packed >= 0, slots, -1).to(torch.int32)


def index_pool(k_TD: Tensor, gate_TD: Tensor, ape_PD: Tensor, tail: State, keys: Paged, rows: Rows) -> None:
    """Write the key of every pool that a row completes, and leave its last P raw keys and gates in the ring.

    The ring is indexed by position % P: [:, 0] keys, [:, 1] gates.
    """
    size = ape_PD.shape[0]
    raw_T2D = torch.stack([k_TD, gate_TD], dim=1).to(tail.data.dtype)
    for row, start, n, tokens in rows.spans():
        if n == 0:
            continue
        slot = tail.slots_R[row]
        open_m2D = torch.cat([tail.data[slot][: start % size], raw_T2D[tokens]])
        num_complete = open_m2D.shape[0] // size
        complete = open_m2D[: num_complete * size].float().view(num_complete, size, 2, k_TD.shape[-1])
        k, gate = complete.unbind(2)
        pooled = (torch.softmax(gate + ape_PD.float(), dim=1) * k).sum(1)
        entries = torch.arange(start // size, start // size + num_complete, device=k_TD.device)
        keys.flat()[keys.slots(torch.full_like(entries, row), entries)] = pooled.to(keys.data.dtype)
        last = min(n, size)
        ring_index = torch.arange(start + n - last, start + n, device=k_TD.device) % size
        tail.data[slot, ring_index] = raw_T2D[tokens][n - last :]
