"""Attention over sink, window and the chosen pages or tokens of the middle, in one launch; no other token is read.

A program takes one row and KV head, and either a span of its sink and window, with all query heads of the group, or a
share of what one query head has chosen. The last program to finish a (row, KV head) merges the partial results. Names
as in eval.cache.attention.kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import places
from leank.eval.cache.attention.kernel import merge, real_rows, sink_and_window, store_rows
from leank.eval.cache.attention.ranking_kernel import CHANNELS, FIELDS, PROMPT_K, TAIL_K, held, line

PROMPT_V, TAIL_V = tl.constexpr(int(places.Column.PROMPT_V)), tl.constexpr(int(places.Column.TAIL_V))
SINK_K, SINK_V = tl.constexpr(int(places.Column.SINK_K)), tl.constexpr(int(places.Column.SINK_V))
RING_K, RING_V = tl.constexpr(int(places.Column.RING_K)), tl.constexpr(int(places.Column.RING_V))

# fmt: off


@triton.jit
def _chosen(
    base, q_row, index, entry, tail_ptr, chosen, x, most, share, shares, scale,
    C: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """A share of what one query head has chosen, pages of PER tokens: numerator [D], maximum and denominator.

    One query has no use for tensor cores, so keys and values go from memory to registers.
    """
    prompt, tokens = held(entry, tail_ptr, x)
    count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
    prompt_k, tail_k = tl.load(entry + PROMPT_K), tl.load(entry + TAIL_K)
    prompt_v, tail_v = tl.load(entry + PROMPT_V), tl.load(entry + TAIL_V)
    total = tl.minimum(most, tl.cdiv(tokens, PER)) * PER
    size = tl.cdiv(tl.cdiv(total, shares), TILE) * TILE
    first, last = share * size, tl.minimum((share + 1) * size, total)
    c, d = tl.arange(0, C), tl.arange(0, D)
    kept = c < count
    channel = tl.load(index + c, mask=kept, other=0)
    query = tl.load(q_row + channel, mask=kept, other=0.0).to(tl.float32) * scale
    acc = tl.zeros([TILE, D], tl.float32)
    z = tl.zeros([TILE], tl.float32)
    m = tl.max(tl.full([TILE], float("-inf"), tl.float32), 0)
    for at in tl.range(first, last, TILE, num_stages=1):
        slot = at + tl.arange(0, TILE)
        token = tl.load(chosen + slot // PER, mask=slot < last, other=0) * PER + slot % PER
        there = (slot < last) & (token < tokens)
        k = base + line(token, prompt, prompt_k, tail_k, count, STEP)[:, None] + c[None, :]
        keys = tl.load(k, mask=there[:, None] & kept[None, :], other=0.0)
        v = base + line(token, prompt, prompt_v, tail_v, D, 16)[:, None] + d[None, :]
        values = tl.load(v, mask=there[:, None], other=0.0)
        s = tl.where(there, tl.sum(keys.to(tl.float32) * query[None, :], 1), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp2(m - safe), tl.exp2(s - safe)
        acc = acc * alpha + p[:, None] * values.to(tl.float32)
        z = z * alpha + p
        m = m_new
    return tl.sum(acc, 0), m, tl.sum(z, 0)


@triton.jit
def _ends(
    base, q_row, ok, entry, seen_ptr, start_ptr, position_ptr, row, p, sink, slots, scale,
    SPAN: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):
    """Span p of the sink, or of the window behind the sink's spans: numerators [M, D], maxima and denominators [M]."""
    seen = tl.load(seen_ptr + row).to(tl.int32)
    of_sink = tl.cdiv(sink, SPAN)  # spans
    ring = p >= of_sink
    start = tl.where(ring, tl.load(start_ptr + row), 0).to(tl.int32)
    position = tl.load(position_ptr + row).to(tl.int32) + tl.zeros([M], tl.int32)
    k_at = tl.where(ring, tl.load(entry + RING_K), tl.load(entry + SINK_K))
    v_at = tl.where(ring, tl.load(entry + RING_V), tl.load(entry + SINK_V))
    first = tl.where(ring, p - of_sink, p) * SPAN
    last = tl.minimum(tl.minimum(first + SPAN, tl.where(ring, slots, sink)), seen)
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, SPAN], tl.float32)
    acc, m, z = sink_and_window(
        acc, m, z, q_row, ok, position, base + tl.multiple_of(k_at, 16), base + tl.multiple_of(v_at, 16), first, last,
        seen, start, slots, ring, scale, q_row, SPAN, D, False)
    return acc, m, tl.sum(z, 1)


@triton.jit(do_not_specialize=["most", "sink", "slots", "ends", "shares"])
def attend(
    base, q, out, index, table, seen_ptr, start_ptr, tail_ptr, position_ptr, chosen, part, stat, done,
    scale, q_b, q_h, index_b, most, sink, slots, ends, shares,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, MERGE_LINES: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """Program (x, p): span p of the sink and window for p < ends, else a share of what one query head has chosen.

    q: [B, Hq, 1, D], by strides
    out: [B, 1, Hq, D]
    chosen: [B * Hq, most] int32, pages of PER tokens
    part, stat: [B * H, ends + shares, ROWS, D] and [B * H, ends + shares, ROWS, 2] fp32, partial results
    done: [B * H] int32, zeros before and after
    sink, slots: slots of the sink and of the window's ring
    ends, shares: programs for sink and window, and for what one query head has chosen
    C: at least the channels of any head
    """
    x, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head, entry = x // H, x % H, table + x * FIELDS
    parts, d = ends + shares, tl.arange(0, D)
    q_head = q + row * q_b + head * GROUP * q_h
    if p < ends:
        r = tl.arange(0, M)
        ok = r < GROUP
        acc, m, z = _ends(base, q_head + r * q_h, ok, entry, seen_ptr, start_ptr, position_ptr, row, p, sink, slots,
                          scale, SPAN, M, D)
        at = (x * parts + p) * ROWS + r
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
        tl.store(stat + 2 * at, m, mask=ok)
        tl.store(stat + 2 * at + 1, z, mask=ok)
    else:
        g, share = (p - ends) // shares, (p - ends) % shares
        one, m_one, z_one = _chosen(base, q_head + g * q_h, index + row * index_b + head * D, entry, tail_ptr,
                                    chosen + (x * GROUP + g) * most, x, most, share, shares, scale,
                                    C, TILE, D, PER, STEP)
        at_one = (x * parts + ends + share) * ROWS + g
        tl.store(part + at_one * D + d, one)
        tl.store(stat + 2 * at_one, m_one)
        tl.store(stat + 2 * at_one + 1, z_one)
    real = real_rows(row, position_ptr, 1, 0, ROWS, GROUP, GROUP)
    tl.debug_barrier()  # all of it is written before the ticket says so
    if tl.atomic_add(done + x, 1, sem="acq_rel") == ends + GROUP * shares - 1:
        merged, _, _ = merge(part, stat, x * parts, parts, ROWS, MERGE_LINES, D)
        store_rows(out, merged, real, row, head, 1, 0, ROWS, GROUP, GROUP, H, D)
        tl.store(done + x, 0)
