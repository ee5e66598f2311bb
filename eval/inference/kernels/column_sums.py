"""Attention that keys receive from all queries, in one pass over the logits: the fast form of `observe.received`."""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import softmax

LOG2_E = tl.constexpr(softmax.LOG2_E)

# fmt: off


@triton.jit
def _from_tile(keys, rows, lse, at, t_stride, scale, queries, before, n, M: tl.constexpr, D: tl.constexpr,
               EDGE: tl.constexpr):
    """Weights of keys [N, D] summed over the queries [at, at + M) of one head: [N]."""
    m, d = tl.arange(0, M), tl.arange(0, D)
    where = rows + at * t_stride + (m[None, :] * t_stride + d[:, None])
    if EDGE:
        there = at + m < queries
        q = tl.load(where, mask=there[None, :], other=0.0)
        total = tl.load(lse + at + m, mask=there, other=float("inf"))
    else:
        q, total = tl.load(where), tl.load(lse + at + m)
    s = tl.dot(keys, q) * scale - (total * LOG2_E)[None, :]
    if EDGE:
        s = tl.where((at + m + before)[None, :] >= n[:, None], s, float("-inf"))
    return tl.sum(tl.exp2(s), 1)


@triton.jit
def sum_columns(
    q, k, lse, real, out, q_b, q_h, q_t, k_b, k_h, k_t, queries, length, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr,
):
    """Program (block, h, b): what N keys of a head receive from all queries at or below the diagonal.

    The first blocks have the most queries, and they start first.
    q: [B, H * GROUP, queries, D], k: [B, H, length, D], by strides; the last query is at the last key
    lse: [B, H * GROUP, queries] fp32, natural logarithm, inf where the query is padding
    real: [B, length] bytes, 0 = padding; read if PADDED
    out: [B, H, length] fp32; scale: factor of the logits, times log2(e)
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, d = block * N + tl.arange(0, N), tl.arange(0, D)
    q_t, k_t = tl.cast(q_t, tl.int64), tl.cast(k_t, tl.int64)
    there = n < length
    keys = tl.load(k + b * k_b + h * k_h + (n[:, None] * k_t + d[None, :]), mask=there[:, None], other=0.0)
    before = length - queries  # keys before the first query
    first = tl.maximum(block * N - before, 0) // M * M
    whole = tl.cdiv(tl.maximum(block * N + N - 1 - before, 0), M) * M  # from here on queries see all keys of the block
    last = queries // M * M  # and from here on a tile is not full
    total = tl.zeros([N], tl.float32)
    for g in range(GROUP):
        rows, row_lse = q + b * q_b + (h * GROUP + g) * q_h, lse + ((b * H + h) * GROUP + g) * queries
        received = tl.zeros([N], tl.float32)  # a head's own, so that a long sum keeps its digits
        for at in range(first, tl.minimum(whole, queries), M):
            received += _from_tile(keys, rows, row_lse, at, q_t, scale, queries, before, n, M, D, True)
        for at in range(whole, last, M):
            received += _from_tile(keys, rows, row_lse, at, q_t, scale, queries, before, n, M, D, False)
        for at in range(tl.maximum(last, whole), queries, M):
            received += _from_tile(keys, rows, row_lse, at, q_t, scale, queries, before, n, M, D, True)
        total += received
    if PADDED:
        total = tl.where(tl.load(real + b * length + n, mask=there, other=0) != 0, total, 0.0)
    tl.store(out + (b * H + h) * length + n, total, mask=there)
