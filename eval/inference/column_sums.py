"""Attention that each key of a prompt receives from all queries, at the price of one more pass over Q K^T."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.cache.attention.backend import why_not
from leank.eval.cache.attention.softmax import LOG2_E, PLAIN, Softmax
from leank.eval.inference.observe import received


class Tiles(NamedTuple):
    """How the kernel is launched.

    keys, queries: of a tile
    warps, stages: of a program
    """

    keys: int = 128
    queries: int = 64
    warps: int = 4
    stages: int = 4


DEFAULT = Tiles()


def attend_and_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    real: Tensor | None = None,
    softmax: Softmax = PLAIN,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last Q of T columns, and what each key receives in it, summed over queries and group.

    The attention kernel hands over each query's log-sum-exp, so that one more pass over the logits is all that the sums
    cost. Where Triton has no GPU, `received` does two passes; the interpreter is for tests of the kernel alone.

    q, k, v, scaling, real, softmax: as for `dense.attend`
    weights: [n] or None, default None: weights of the last n queries in the sums, each at least 0; None = all by 1

    Returns ([B, Q, Hq, D], [B, H, T] in float32 or wider).
    """
    reason = why_not(q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], interpret=False)
    if reason or not softmax.plain or q.shape[2] == 1:
        each = received(q, k, weights, real, scaling, softmax)
        return dense.attend(q, k, v, scaling, real, softmax), each.unflatten(1, (k.shape[1], -1)).sum(2)
    lse = torch.full(q.shape[:3], torch.inf, device=q.device)
    out = dense.attend(q, k, v, scaling, real, lse=lse)
    if weights is not None:  # w exp(s - lse) = exp(s - (lse - log w))
        q, lse = q[:, :, -len(weights) :], lse[:, :, -len(weights) :] - weights.log()
    return out, column_sums(q, k, lse, scaling, real)


def column_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scaling: float | None = None,
    real: Tensor | None = None,
    tiles: Tiles = DEFAULT,
) -> Tensor:
    """Sum over all queries t and the heads of the group of exp(scaling q_t K^T - lse_t); `received` is the slow form.

    q, k, scaling, real: as for `dense.attend`
    lse: [B, Hq, Q] float32, log-sum-exp of each query over the real keys that it sees; inf where the query is padding
    tiles: Tiles: how it is launched

    Returns [B, H, T] float32, zero in padding.
    """
    from leank.eval.inference.kernels.column_sums import sum_columns

    (batch, q_heads, queries, dim), (heads, length) = q.shape, k.shape[1:3]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=k.device)
    sum_columns[(-(-length // tiles.keys), heads, batch)](
        *(q, k, lse.contiguous(), out if real is None else real.contiguous().view(torch.uint8), out),
        *(*q.stride()[:3], *k.stride()[:3], queries, length, (dim**-0.5 if scaling is None else scaling) * LOG2_E),
        H=heads,
        GROUP=q_heads // heads,
        D=dim,
        N=tiles.keys,
        M=tiles.queries,
        PADDED=real is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
