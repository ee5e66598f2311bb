"""Attention that keys receive, summed over queries a block at a time; the S x S matrix is never built.

`received` is the plain form. `attend_and_sum` computes it beside the attention itself, and where Triton has a GPU at
the price of one more pass over Q K^T.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from leank.eval.cache.attention import dense
from leank.eval.cache.attention.backend import why_not
from leank.eval.cache.attention.softmax import LOG2_E, PLAIN, Softmax
from leank.kernels import HALF, SCORES_AT_ONCE


def received(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor | None = None,
    real: Tensor | None = None,
    scaling: float | None = None,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Attention that each key receives from the last n queries: sum over t of weights[t] softmax(scaling q_t K^T).

    It is causal and computed in float32 or wider.
    queries: [B, Hq, >= n, D], the last one at the last key; keys: [B, H, T, D]
    weights: [n], None = 1 for every given query
    real: bool [B, T], False = padding, which neither gives nor receives attention; None = no padding
    scaling: factor of q k^T, None = 1 / sqrt(D)
    Returns [B, Hq, T].
    """
    count = queries.shape[2] if weights is None else len(weights)
    (batch, heads, length, dim), wide = keys.shape, torch.promote_types(keys.dtype, torch.float32)
    scale, half = dim**-0.5 if scaling is None else scaling, multiplies_half(keys.device, keys.dtype)
    grouped = queries[:, :, -count:].unflatten(1, (heads, -1))
    if not half:
        grouped, keys = grouped.to(wide) * scale, keys.to(wide)
    weight = grouped.new_ones(count, dtype=wide) if weights is None else weights.to(wide)
    weight = weight.expand(batch, count) if real is None else weight * real[:, length - count :]
    column = torch.arange(length, device=keys.device)
    total = grouped.new_zeros(*grouped.shape[:3], length, dtype=wide)
    padded = 0 if real is None else int((~real * (column + 1)).max())  # all padding is in the first so many columns
    block = max(1, SCORES_AT_ONCE["cuda" if keys.is_cuda else "cpu"] // (batch * queries.shape[1] * length))
    for start in range(0, count, block):
        stop = min(start + block, count)
        new, end = stop - start, length - count + stop  # end: keys that this block's last query sees
        rows = grouped[:, :, :, start:stop].flatten(2, 3)  # folded, so that no head of a group copies its keys
        seen = keys[:, :, :end].mT
        logits = scaled_product(rows, seen, scale) if half else rows @ seen
        logits = softmax.cap(logits.unflatten(2, (-1, new)))  # [B, H, G, new, end]
        logits[..., end - new :].masked_fill_(column[:new] > column[:new, None], -torch.inf)
        if padded:  # padding queries see all keys before them, so that no row is empty; their weight is 0
            hidden = ~real[:, None, : min(padded, end)] & real[:, end - new : end, None]  # type: ignore[index]
            logits[..., : hidden.shape[-1]].masked_fill_(hidden[:, None, None], -torch.inf)
        weights_of_keys = softmax.weights(logits.flatten(1, 2)).view_as(logits)
        total[..., :end] += (weight[:, None, None, None, start:stop] @ weights_of_keys).squeeze(-2)
    return total.flatten(1, 2)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The product scale * a b in float32 of half-precision a [B, H, n, D] and b, where `multiplies_half` says so."""
    out = a.new_empty(*a.shape[:3], b.shape[-1], dtype=torch.float32)
    flat = out.flatten(0, 1)  # as input, too, for otherwise it would be copied; beta = 0: it is not read
    torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), torch.float32, beta=0, alpha=scale, out=flat)
    return out


@functools.cache
def multiplies_half(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies `dtype` into float32 without rounding in between, as CUDA does for half precision."""
    if dtype not in HALF:
        return False
    x = torch.full((1, 1, 16, 16), 1.0625, dtype=dtype, device=device)
    try:
        return bool((scaled_product(x, x.mT, 0.25) == 0.25 * 16 * 1.0625**2).all())
    except (RuntimeError, TypeError):
        return False


class Tiles(NamedTuple):
    """How the kernel is launched."""

    keys: int = 128  # keys, queries: of a tile
    queries: int = 64
    warps: int = 4  # warps, stages: of a program
    stages: int = 4


TILES = Tiles()


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
    weights: [n], of the last n queries in the sums, each at least 0; None = all by 1. Others: see `dense.attend`
    Returns ([B, Q, Hq, D], [B, H, T] in float32 or wider).
    """
    reason = why_not(q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1], insist=False)
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
    tiles: Tiles = TILES,
) -> Tensor:
    """Sum over all queries t and the heads of the group of exp(scaling q_t K^T - lse_t); `received` is the slow form.

    lse: [B, Hq, Q] float32, log-sum-exp of each query over the real keys that it sees; inf where the query is padding
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
