"""The middle's part of the decode kernel: queries gathered for a head's channels, then tile by tile of its tokens.

Names as in eval.cache.attention.kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit
def step(acc, m, z, s, v):
    """One tile: s [M, T] logits, v [T, D]; z [M, T] is summed over T only at the end."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - safe)
    p = tl.exp2(s - safe[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, z * alpha[:, None] + p


@triton.jit
def gather(q_row, ok, index, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] that a head keeps."""
    if EVEN:
        return tl.load(q_row[:, None] + tl.load(index + channel)[None, :], mask=ok[:, None], other=0.0)
    chosen = channel < count
    picked = tl.load(index + channel, mask=chosen, other=0)
    return tl.load(q_row[:, None] + picked[None, :], mask=ok[:, None] & chosen[None, :], other=0.0)


@triton.jit
def _keys(k, channel, count, token, tokens, EVEN: tl.constexpr, PAGE: tl.constexpr):
    """K tile [C, T] of a page-wise stored head; pages at or past `tokens` are not read."""
    at = channel[:, None] * PAGE + ((token // PAGE) * (count * PAGE) + token % PAGE)[None, :]
    one_page: tl.constexpr = token.shape[0] == PAGE
    if one_page:
        if EVEN:
            return tl.load(k + at)
        return tl.load(k + at, mask=(channel < count)[:, None], other=0.0)
    there = (token // PAGE * PAGE < tokens)[None, :]
    if EVEN:
        return tl.load(k + at, mask=there, other=0.0)
    return tl.load(k + at, mask=there & (channel < count)[:, None], other=0.0)


@triton.jit
def middle(
    acc, m, z, q_row, ok, index, k, v, first, last, count, scale, logits,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, WEIGHTS: tl.constexpr,
):
    """Tokens [first, last) of a middle part with up to C0 + C1 channels; whole tiles without masks, then the rest.

    logits: [M], where the logit of the part's first token is written; used if WEIGHTS.
    """
    token, d = tl.arange(0, TILE), tl.arange(0, D)
    c0 = tl.arange(0, C0)
    q0 = gather(q_row, ok, index, c0, count, EVEN)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        q1 = gather(q_row, ok, index, c1, count, EVEN)
    v_at = token[:, None] * D + d[None, :]
    whole = first + (last - first) // TILE * TILE
    for at in range(first, whole, TILE):
        page = k + tl.multiple_of((at // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, TILE, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, TILE, EVEN, PAGE), s)
        if WEIGHTS:
            tl.store(logits[:, None] + (at + token)[None, :], s * scale, mask=ok[:, None])
        acc, m, z = step(acc, m, z, s * scale, tl.load(v + tl.multiple_of(at * D, PAGE) + v_at))
    if whole < last:
        there = token < last - whole
        page = k + tl.multiple_of((whole // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, last - whole, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, last - whole, EVEN, PAGE), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        if WEIGHTS:
            tl.store(logits[:, None] + (whole + token)[None, :], s, mask=ok[:, None] & there[None, :])
        rest = tl.load(v + tl.multiple_of(whole * D, PAGE) + v_at, mask=there[:, None], other=0.0)
        acc, m, z = step(acc, m, z, s, rest)
    return acc, m, z
