"""Index branch of sparse attention, plain torch: scores in chunks of tokens, selection without a sort.

Letters as in ref.py; R rows of n tokens, S index entries of the longest row, s their tokens, c tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.paged.cache import Paged
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
    out = torch.full((q_TID.shape[0], width), -1, dtype=torch.int32, device=q_TID.device)
    for group in rows.groups:
        q_RnID, weights_RnI = group.take(q_TID), group.take(weights_TI)
        k_RSD, slots_Rs = keys.read_group(group, torch.float32), latent.group_slots(group)
        chunks = []
        for begin in range(0, group.n, chunk_tokens):
            cut = slice(begin, begin + chunk_tokens)
            position_Rc = group.position_Rn[:, cut]
            # entries past the chunk's last token are seen by none of its tokens
            num_tokens = group.longest - group.n + min(group.n, cut.stop)
            score_RcS = _scores(q_RnID[:, cut], weights_RnI[:, cut], k_RSD[:, : num_tokens // pool_size])
            kept_RcS = _best(score_RcS, (position_Rc + 1) // pool_size, topk // pool_size)
            kept_Rcs = _expand(kept_RcS, position_Rc, num_tokens, pool_size, always_tail)
            chunks.append(_pack(kept_Rcs, slots_Rs[:, :num_tokens], width))
        group.put(out, torch.cat(chunks, dim=1))
    return out


def _scores(q_RcID: Tensor, weights_RcI: Tensor, k_RSD: Tensor) -> Tensor:
    dots_RqS = (q_RcID.float().flatten(1, 2) @ k_RSD.mT).mul_(q_RcID.shape[3] ** -0.5).relu_()
    dots_RcIS = dots_RqS.view(*q_RcID.shape[:3], k_RSD.shape[1])
    return (weights_RcI.float()[:, :, None] @ dots_RcIS)[:, :, 0]


def _best(score_RcS: Tensor, visible_Rc: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` best visible entries, fewer if fewer are visible; ties keep the smaller entry."""
    visible_RcS = torch.arange(score_RcS.shape[2], device=score_RcS.device) < visible_Rc[..., None]
    if count >= score_RcS.shape[2]:
        return visible_RcS
    if count == 0:
        return torch.zeros_like(visible_RcS)
    score_RcS = score_RcS.masked_fill_(~visible_RcS, float("-inf"))
    # topk alone leaves the choice among equal scores open, so only its last value is used
    edge_Rc1 = score_RcS.topk(count).values[..., -1:]
    above, level = score_RcS > edge_Rc1, score_RcS == edge_Rc1
    room_Rc1 = count - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= room_Rc1))) & visible_RcS


def _expand(kept_RcS: Tensor, position_Rc: Tensor, num_tokens: int, pool_size: int, always_tail: bool) -> Tensor:
    """Return the mask over tokens from a mask over entries, with the open pool added."""
    if pool_size == 1:
        return kept_RcS
    kept_Rcs = kept_RcS[..., None].expand(-1, -1, -1, pool_size).flatten(2)
    kept_Rcs = F.pad(kept_Rcs, (0, num_tokens - kept_Rcs.shape[2]))
    if not always_tail:
        return kept_Rcs
    token_s = torch.arange(num_tokens, device=kept_Rcs.device)
    position_Rc1 = position_Rc[..., None]
    return kept_Rcs | ((token_s >= (position_Rc1 + 1) // pool_size * pool_size) & (token_s <= position_Rc1))


def _pack(kept_Rcs: Tensor, slots_Rs: Tensor, width: int) -> Tensor:
    """Return the slots of the kept tokens, [R, c, width], in order, -1 behind."""
    # what is not kept goes to a last column that is cut off: no sync, no sort
    column_Rcs = (kept_Rcs.cumsum(-1) - 1).masked_fill_(~kept_Rcs, width)
    packed = slots_Rs.new_full((*kept_Rcs.shape[:2], width + 1), -1)
    return packed.scatter_(2, column_Rcs, slots_Rs[:, None].expand_as(column_Rcs))[..., :width]
