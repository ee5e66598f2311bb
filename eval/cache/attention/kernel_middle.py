"""The middle's part of the decode kernel: queries gathered for a head's channels, then tile by tile of its tokens.

Names as in eval.cache.attention.kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit
def step(acc, m, z, s, v):
    """One tile: s [M, T] logits, v [T, columns of acc]; z [M, T] is summed over T only at the end."""
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - safe)
    p = tl.exp2(s - safe[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, z * alpha[:, None] + p


@triton.jit
def wait_for_the_launch_ahead(EARLY: tl.constexpr):
    """Return when the launch ahead has ended, if this one began before; the next one's programs may then begin.

    What comes before reads only the work table and the kept channels. The launches that let another begin, `write` and
    `decode`, write neither.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _kept_channels(index, channel, count, EVEN: tl.constexpr):
    """The numbers [C] of channels that a head keeps."""
    if EVEN:
        return tl.load(index + channel)
    return tl.load(index + channel, mask=channel < count, other=0)


@triton.jit
def _gather(q_row, ok, kept, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] with the numbers `kept`."""
    if EVEN:
        return tl.load(q_row[:, None] + kept[None, :], mask=ok[:, None], other=0.0)
    return tl.load(q_row[:, None] + kept[None, :], mask=ok[:, None] & (channel < count)[None, :], other=0.0)


@triton.jit
def gather(q_row, ok, index, channel, count, EVEN: tl.constexpr):
    """Query channels [M, C] that a head keeps."""
    return _gather(q_row, ok, _kept_channels(index, channel, count, EVEN), channel, count, EVEN)


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
def _values(
    v, at, width, token, tokens, D: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
):
    """V tile of tokens at .. at + tokens - 1, zeros behind them unless the tile is whole: [T, D], or [T, VALUES]."""
    if VALUES == 0:
        v_at = v + tl.multiple_of(at * D, PAGE) + (token[:, None] * D + tl.arange(0, D)[None, :])
        found = tl.load(v_at) if WHOLE else tl.load(v_at, mask=(token < tokens)[:, None], other=0.0)
    else:
        channel = tl.arange(0, VALUES)
        page = v + tl.multiple_of((at // PAGE) * (width * PAGE), PAGE)
        tile = _keys(page, channel, width, token, tokens, False, PAGE)
        found = tl.trans(tile) if WHOLE else tl.trans(tl.where((token < tokens)[None, :], tile, 0.0))
    return found


@triton.jit
def add_kept(acc, of_kept, m_before, m, ranks, D: tl.constexpr):
    """The numerator acc [M, D] of maximum m_before, and of_kept [M, VALUES] of maximum m, of the kept channels of V.

    ranks: the place of every channel among the kept, [D], -1 = pruned, which receives nothing
    """
    rank = tl.load(ranks + tl.arange(0, D))
    place = tl.broadcast_to(tl.maximum(rank, 0)[None, :], acc.shape)
    found = tl.where((rank >= 0)[None, :], tl.gather(of_kept, place, 1), 0.0)
    return acc * tl.exp2(m_before - tl.where(m == float("-inf"), 0.0, m))[:, None] + found


@triton.jit
def middle(
    acc, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, WEIGHTS: tl.constexpr, EARLY: tl.constexpr,
):
    """Tokens [first, last) of a middle part with up to C0 + C1 channels; whole tiles without masks, then the rest.

    acc: [M, D], or [M, VALUES] where V is pruned to `width` channels, at most VALUES
    logits: [M], where the logit of the part's first token is written; used if WEIGHTS.
    """
    token = tl.arange(0, TILE)
    c0 = tl.arange(0, C0)
    kept0 = _kept_channels(index, c0, count, EVEN)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        kept1 = _kept_channels(index, c1, count, EVEN)
    wait_for_the_launch_ahead(EARLY)
    q0 = _gather(q_row, ok, kept0, c0, count, EVEN)
    if C1 > 0:
        q1 = _gather(q_row, ok, kept1, c1, count, EVEN)
    whole = first + (last - first) // TILE * TILE
    for at in range(first, whole, TILE):
        page = k + tl.multiple_of((at // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, TILE, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, TILE, EVEN, PAGE), s)
        if WEIGHTS:
            tl.store(logits[:, None] + (at + token)[None, :], s * scale, mask=ok[:, None])
        acc, m, z = step(acc, m, z, s * scale, _values(v, at, width, token, TILE, D, VALUES, PAGE, True))
    if whole < last:
        there = token < last - whole
        page = k + tl.multiple_of((whole // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, last - whole, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, last - whole, EVEN, PAGE), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        if WEIGHTS:
            tl.store(logits[:, None] + (whole + token)[None, :], s, mask=ok[:, None] & there[None, :])
        values = _values(v, whole, width, token, last - whole, D, VALUES, PAGE, False)
        acc, m, z = step(acc, m, z, s, values)
    return acc, m, z
