"""Mixture of experts, plain torch: a pair of matmuls per expert that was hit, or every expert where these are tiny.

Letters as in ref.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.glu.eager import activation, glu

# multiplications; below, computing every expert costs less than one small call per expert that was hit
MAX_EVERY_EXPERT = 1 << 22


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
    logits_TE = F.linear(x_TH.float(), weight_EH.float())
    if score == "sigmoid":
        p_TE = torch.sigmoid(logits_TE)
    elif score == "softmax":
        p_TE = torch.softmax(logits_TE, dim=1)
    else:
        raise ValueError(f"router score must be sigmoid or softmax, got {score!r}")
    choice_TE = p_TE if bias_E is None else p_TE + bias_E.float()
    if num_groups > 1:
        choice_TE = _keep_best_groups(choice_TE, num_groups, topk_groups)
    ids_TK = _first_best(choice_TE, top_k)
    weights_TK = p_TE.gather(1, ids_TK)
    if renorm:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return weights_TK * scale, ids_TK.to(torch.int32)


def _first_best(values: Tensor, count: int) -> Tensor:
    # topk leaves the order of equal values open, a stable sort does not
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _keep_best_groups(choice_TE: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    choice_TGe = choice_TE.view(choice_TE.shape[0], num_groups, choice_TE.shape[1] // num_groups)
    value_TG = choice_TGe.topk(min(2, choice_TGe.shape[2]), dim=2).values.sum(2)
    lost_TG = torch.ones_like(value_TG, dtype=torch.bool)
    lost_TG.scatter_(1, _first_best(value_TG, topk_groups), False)
    return choice_TGe.masked_fill(lost_TG[..., None], float("-inf")).flatten(1)


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
    """Return the weighted sum of the chosen experts, [T, H], in x.dtype; accumulated in fp32."""
    if x_TH.shape[0] * gate_up_EIH.numel() <= MAX_EVERY_EXPERT:
        y_ETH = _every_expert(x_TH, gate_up_EIH, down_EHI, kind, limit)
        # chosen by index: an overflow of another expert must not reach the sum as 0 * inf
        y_TKH = y_ETH[ids_TK.long(), torch.arange(x_TH.shape[0], device=x_TH.device)[:, None]]
        return (weights_TK.float()[:, None] @ y_TKH.float())[:, 0].to(x_TH.dtype)
    y_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    flat_ids = ids_TK.flatten().long()
    order = flat_ids.argsort(stable=True)
    token = order // ids_TK.shape[1]
    weights = weights_TK.flatten()[order].float()
    begin = 0
    for e, count in enumerate(torch.bincount(flat_ids, minlength=gate_up_EIH.shape[0]).tolist()):
        if count == 0:
            continue
        hit = slice(begin, begin + count)
        begin += count
        hidden = _activated(F.linear(x_TH[token[hit]], gate_up_EIH[e]), kind, limit)
        y_TH.index_add_(0, token[hit], F.linear(hidden, down_EHI[e]).float() * weights[hit, None])
    return y_TH.to(x_TH.dtype)


def _every_expert(x_TH: Tensor, gate_up_EIH: Tensor, down_EHI: Tensor, kind: str, limit: float | None) -> Tensor:
    """Return the output of every expert, [E, T, H]."""
    num_experts, rows, _ = gate_up_EIH.shape
    gate_up = F.linear(x_TH, gate_up_EIH.flatten(0, 1)).view(-1, rows)
    hidden_TEI = _activated(gate_up, kind, limit).view(-1, num_experts, down_EHI.shape[2])
    return hidden_TEI.transpose(0, 1) @ down_EHI.mT


def _activated(gate_up: Tensor, kind: str, limit: float | None) -> Tensor:
    return activation(gate_up, kind=kind) if kind == "relu2" else glu(gate_up, kind=kind, limit=limit)
