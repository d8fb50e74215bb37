"""Index branch of sparse attention. Reference, fp32.

    score[t, s] = sum_i w[t, i] relu(D^-1/2 q[t, i] . k[s])       entry s covers tokens [s P, (s + 1) P)
    visible iff (s + 1) P - 1 <= pos ; keep the topk // P best, ties to the smaller position ; expand to tokens
    always_tail adds the tokens of the open pool, [ (pos + 1) // P * P , pos ]
    pooled key = sum_t softmax_t(gate_t + ape_t) k_t per channel over the P tokens of a complete pool

Shapes: T tokens, I index heads, D index head dim, P pool size (1 = one key per token); ring [S, P, 2, D].
Source: DeepSeek-V3.2 (2025) eq. 1; transformers 5.23 modeling_deepseek_v32.py:227, modeling_glm5_next.py:773-1061.
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
        for t in range(n):
            pos = start + t
            k_SD = keys.read(row, (pos + 1) // pool_size).float()
            dots_IS = torch.relu(q_TID[tokens][t].float() @ k_SD.T * q_TID.shape[2] ** -0.5)
            score_S = weights_TI[tokens][t].float() @ dots_IS
            best = score_S.sort(descending=True, stable=True).indices[: topk // pool_size].tolist()
            kept = [entry * pool_size + i for entry in sorted(best) for i in range(pool_size)]
            kept += range((pos + 1) // pool_size * pool_size, pos + 1) if always_tail else []
            positions = torch.tensor(kept, dtype=torch.int64, device=q_TID.device)
            slots[tokens][t, : len(kept)] = latent.slots(torch.full_like(positions, row), positions).to(torch.int32)
    return slots


def index_pool(k_TD: Tensor, gate_TD: Tensor, ape_PD: Tensor, tail: State, keys: Paged, rows: Rows) -> None:
    """Write the key of every pool that a row completes, and leave its last P raw keys and gates in the ring.

    The ring is indexed by position % P: [:, 0] keys, [:, 1] gates.
    """
    size = ape_PD.shape[0]
    for row, start, _, tokens, export in rows.pieces():
        ring_P2D = tail.data[int(tail.slots_R[row])]
        for pos, (k_D, gate_D) in enumerate(zip(k_TD[tokens], gate_TD[tokens], strict=True), start):
            ring_P2D[pos % size, 0] = k_D.to(ring_P2D.dtype)
            ring_P2D[pos % size, 1] = gate_D.to(ring_P2D.dtype)
            if (pos + 1) % size == 0:
                probs_PD = torch.softmax(ring_P2D[:, 1].float() + ape_PD.float(), dim=0)
                entry = torch.tensor([pos // size], device=k_TD.device)
                slot = keys.slots(torch.full_like(entry, row), entry)
                keys.flat()[slot] = (probs_PD * ring_P2D[:, 0].float()).sum(0).to(keys.data.dtype)
        if export is not None:
            tail.data[export] = ring_P2D
