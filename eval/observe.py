"""Attention that keys receive, summed over queries, a block of queries at a time: the S x S matrix is never built."""

from __future__ import annotations

import torch
from torch import Tensor

from leank_train.attention import SCORES_AT_ONCE


def received(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor | None = None,
    real: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """What each key gets from the last n queries: sum over t of weights[t] softmax(scaling q_t K^T), causal.

    queries [B, Hq, >= n, D], of which the last is at the last key; keys [B, H, T, D]; weights [n], None = 1 for each
    query given; real [B, T] bool, False = padding, which neither gives nor receives, None = no padding; scaling: None =
    1 / sqrt(D). In float32 or wider. Returns [B, Hq, T].
    """
    count = queries.shape[2] if weights is None else len(weights)
    (batch, heads, length, dim), wide = keys.shape, torch.promote_types(keys.dtype, torch.float32)
    grouped = (queries[:, :, -count:].to(wide) * (dim**-0.5 if scaling is None else scaling)).unflatten(1, (heads, -1))
    transposed = keys.to(wide).mT  # [B, H, D, T]
    weight = grouped.new_ones(count) if weights is None else weights.to(wide)
    weight = weight.expand(batch, count) if real is None else weight * real[:, length - count :]
    column, total = torch.arange(length, device=keys.device), grouped.new_zeros(*grouped.shape[:3], length)
    block = max(1, SCORES_AT_ONCE["cuda" if keys.is_cuda else "cpu"] // (batch * queries.shape[1] * length))
    for start in range(0, count, block):
        stop = min(start + block, count)
        end = length - count + stop  # keys that this block's last query sees
        position = column[end - stop + start : end]
        hidden = (column[:end] > position[:, None]).expand(batch, -1, -1)
        if real is not None:  # padding queries see all keys before them, so that no row is empty; their weight is 0
            hidden = hidden | (~real[:, None, :end] & real[:, position, None])
        rows = grouped[:, :, :, start:stop].flatten(2, 3)  # folded, so that the keys of a group are not copied for each
        logits = (rows @ transposed[..., :end]).unflatten(2, (-1, stop - start))
        logits.masked_fill_(hidden[:, None, None], -torch.inf)
        total[..., :end] += (weight[:, None, None, None, start:stop] @ logits.softmax(-1)).squeeze(-2)
    return total.flatten(1, 2)
