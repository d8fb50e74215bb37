"""Mixture of experts. Reference, fp32.

    logits = x W^T ; sigmoid: p = sigmoid(logits), choice = p + bias ; softmax: p = choice = softmax(logits)
    groups: value = sum of the two best choices of the group; outside the best topk_groups choice = -inf
    ids = top_k(choice), ties to the smaller id ; w = p[ids] ; renorm: w / (sum w + 1e-20) ; w * scale
    y = sum_k w_k down[id_k] act(gate_up[id_k] x)

Shapes: T tokens, H width of the experts' input, E experts, K chosen, I expert intermediate size;
gate_up [E, 2I, H], gate first; relu2, which has no gate: [E, I, H].
Source: DeepSeek-V3 (2024) eq. 12-16; transformers 5.23 modeling_glm5_next.py:144, modeling_qwen3_moe.py router.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.glu.ref import activation, glu


def router(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    *,
    score: str,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renorm: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (weights fp32 [T, K], expert ids int32 [T, K]), best choice first.

    Raises: ValueError on another score than "sigmoid" and "softmax".
    """
    logits_TE = x_TH.float() @ weight_EH.float().T
    if score not in ("sigmoid", "softmax"):
        raise ValueError(f"router score must be sigmoid or softmax, got {score!r}")
    p_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else torch.softmax(logits_TE, dim=1)
    choice_TE = p_TE if bias_E is None else p_TE + bias_E.float()
    ids = []
    for choice_E in choice_TE:
        two_best = choice_E.view(num_groups, -1).sort(dim=1, descending=True).values[:, :2]
        value = two_best.sum(1).tolist()
        kept = sorted(range(num_groups), key=lambda g: -value[g])[:topk_groups]
        size = choice_E.shape[0] // num_groups
        candidates = [e for e in range(choice_E.shape[0]) if num_groups == 1 or e // size in kept]
        choice = choice_E.tolist()
        ids.append(sorted(candidates, key=lambda e: -choice[e])[:top_k])
    ids_TK = torch.tensor(ids, dtype=torch.int64, device=x_TH.device).view(-1, top_k)
    weights_TK = p_TE.gather(1, ids_TK)
    if renorm:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return weights_TK * scale, ids_TK.to(torch.int32)


def experts(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EIH: Tensor,
    down_EHI: Tensor,
    *,
    kind: str,
    limit: float | None = None,
) -> Tensor:
    """Return the weighted sum of the chosen experts, [T, H], in x.dtype."""
    y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for t, ids in enumerate(ids_TK.tolist()):
        for k, e in enumerate(ids):
            gate_up = (x_TH[t].float() @ gate_up_EIH[e].float().T)[None]
            hidden = activation(gate_up, kind=kind) if kind == "relu2" else glu(gate_up, kind=kind, limit=limit)
            y_TH[t] += weights_TK[t, k].float() * (hidden[0] @ down_EHI[e].float().T)
    return y_TH.to(x_TH.dtype)
