"""The index branch: scores the whole history and keeps the best tokens.

T tokens, H hidden, I index heads, D index head dim, K kept, P tokens per pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.layers.context import LayerContext
from firstlight.layers.linear import Linear, MergedLinear
from firstlight.layers.norm import NormLayer
from firstlight.layers.parameter import Module
from firstlight.layers.rope import RotaryLayer
from firstlight.spec.mixers import MLAttention


class IndexLayer(Module):
    """Query heads from the query latent, one key head from the hidden state, a weight per head.

    pooled: keys are a gated mean over P tokens and whole pools are selected.
    """

    def __init__(self, hidden_size: int, spec: MLAttention) -> None:
        super().__init__()
        index = spec.indexer
        assert index is not None, "built only where there is an indexer"
        assert spec.q_lora_rank is not None, "an indexer reads the query latent"
        self.spec = index
        outputs = {"k_proj": index.head_dim, "weights_proj": index.num_heads}
        outputs |= {"gate_proj": index.head_dim} if index.pool else {}
        self.in_proj = MergedLinear(hidden_size, outputs)
        self.k_norm = NormLayer(index.head_dim, index.key_norm)
        self.q_proj = Linear(spec.q_lora_rank, index.num_heads * index.head_dim)
        self.rope = RotaryLayer(index.rope) if index.rope else None
        if index.pool:
            self.add_parameter("position_bias", (index.pool.size, index.head_dim), dtype=torch.float32)

    def forward(self, x_TH: Tensor, q_latent_TQ: Tensor, ctx: LayerContext) -> Tensor:
        """Return int32 [T, K] physical slots of the latent cache, ascending by position, -1 padded."""
        spec, ops = self.spec, ctx.ops
        k_TD, weights_TI, *gate = self.in_proj(x_TH, ops)
        k_TD = self.k_norm(k_TD, ops)
        q_TID = self.q_proj(q_latent_TQ, ops).unflatten(-1, (-1, spec.head_dim))
        if self.rope is not None:
            q_TID, k_TD = self.rope(q_TID, ctx), self.rope(k_TD.unsqueeze(1), ctx).squeeze(1)
        keys = ctx.cache.pages["index"]
        if spec.pool:
            ops.index_pool(k_TD, gate[0], self.position_bias, ctx.cache.states["index_tail"], keys, ctx.rows)
        else:
            ops.cache_write(k_TD, keys, ctx.rows)
        selection: Tensor = ops.index_topk(
            q_TID,
            weights_TI.float() * spec.num_heads**-0.5,
            keys,
            ctx.rows,
            ctx.cache.pages["latent"],
            topk=spec.topk,
            pool_size=spec.pool.size if spec.pool else 1,
            always_tail=spec.pool.always_tail if spec.pool else False,
        )
        return selection
