"""Attention over sink, window and the chosen pages or tokens of the middle, in one launch; no other token is read.

A program takes one row and KV head, and either a span of its sink and window, with all query heads of the group, or a
share of what one query head has chosen. The last program to finish a (row, KV head) merges the partial results. Names
as in eval.cache.attention.kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention import places
from eval.cache.attention.kernel import _sink_and_window, _store, merge
from eval.cache.attention.kernel_middle import gather, step
from eval.cache.attention.ranking_kernel import CHANNELS, FIELDS, PROMPT_K, TAIL_K, held, line

PROMPT_V, TAIL_V = tl.constexpr(int(places.Column.PROMPT_V)), tl.constexpr(int(places.Column.TAIL_V))
SINK_K, SINK_V = tl.constexpr(int(places.Column.SINK_K)), tl.constexpr(int(places.Column.SINK_V))
RING_K, RING_V = tl.constexpr(int(places.Column.RING_K)), tl.constexpr(int(places.Column.RING_V))

# fmt: off


@triton.jit
def _chosen(
    acc, m, z, base, q_row, ok, index, entry, chosen, prompt, tokens, first, last, count, scale,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """Slots [first, last) of the chosen pages of PER tokens, with up to C0 + C1 channels."""
    prompt_k, tail_k = tl.multiple_of(tl.load(entry + PROMPT_K), STEP), tl.multiple_of(tl.load(entry + TAIL_K), STEP)
    prompt_v, tail_v = tl.multiple_of(tl.load(entry + PROMPT_V), 16), tl.multiple_of(tl.load(entry + TAIL_V), 16)
    c0, d = tl.arange(0, C0), tl.arange(0, D)
    q0 = gather(q_row, ok, index, c0, count, False)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        q1 = gather(q_row, ok, index, c1, count, False)
    for at in range(first, last, TILE):
        slot = at + tl.arange(0, TILE)
        token = tl.load(chosen + slot // PER, mask=slot < last, other=0) * PER + slot % PER
        there = (slot < last) & (token < tokens)
        k = base + tl.multiple_of(line(token, prompt, prompt_k, tail_k, count), STEP)[:, None]
        s = tl.dot(q0, tl.trans(tl.load(k + c0[None, :], mask=there[:, None] & (c0 < count)[None, :], other=0.0)))
        if C1 > 0:
            k1 = tl.load(k + c1[None, :], mask=there[:, None] & (c1 < count)[None, :], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        v = base + tl.multiple_of(line(token, prompt, prompt_v, tail_v, D), 16)[:, None] + d[None, :]
        acc, m, z = step(acc, m, z, s, tl.load(v, mask=there[:, None], other=0.0))
    return acc, m, z


@triton.jit(do_not_specialize=["most", "sink", "slots", "ends", "shares"])
def attend(
    base, q, out, index, table, seen_ptr, start_ptr, tail_ptr, position_ptr, chosen, part, stat, done,
    scale, q_b, q_h, index_b, most, sink, slots, ends, shares,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, MERGE_LINES: tl.constexpr, PER: tl.constexpr, STEP: tl.constexpr,
):
    """Program (x, p): span p of the sink and window for p < ends, else a share of what one query head has chosen.

    q: [B, Hq, 1, D], by strides
    out: [B, 1, Hq, D]
    chosen: [B * Hq, most] int32, pages of PER tokens
    part, stat: [B * H, ends + shares, ROWS, D] and [B * H, ends + shares, ROWS, 2] fp32, partial results
    done: [B * H] int32, zeros before and after
    sink, slots: slots of the sink and of the window's ring
    ends, shares: programs for sink and window, and for what one query head has chosen
    """
    x, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head, entry = x // H, x % H, table + x * FIELDS
    parts = ends + shares
    r, d = tl.arange(0, M), tl.arange(0, D)
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    g, share = tl.maximum(p - ends, 0) // shares, tl.maximum(p - ends, 0) % shares
    of_ends = p < ends
    ok = r < tl.where(of_ends, GROUP, 1)
    g_row = tl.where(of_ends, r, g)  # the query head in each row of the tile
    q_row = q + row * q_b + (head * GROUP + g_row) * q_h
    if of_ends:
        seen, start = tl.load(seen_ptr + row).to(tl.int32), tl.load(start_ptr + row).to(tl.int32)
        position = tl.load(position_ptr + row).to(tl.int32) + tl.zeros([M], tl.int32)
        first, last = p * SPAN, (p + 1) * SPAN
        k, v = base + tl.multiple_of(tl.load(entry + SINK_K), 16), base + tl.multiple_of(tl.load(entry + SINK_V), 16)
        end = tl.minimum(tl.minimum(last, sink), seen)
        acc, m, z = _sink_and_window(acc, m, z, q_row, ok, position, k, v, first, end, seen, 0, slots, p < 0,
                                     scale, q_row, TILE, D, False)
        k, v = base + tl.multiple_of(tl.load(entry + RING_K), 16), base + tl.multiple_of(tl.load(entry + RING_V), 16)
        first, end = tl.maximum(first - sink, 0), tl.minimum(tl.minimum(last - sink, slots), seen)
        acc, m, z = _sink_and_window(acc, m, z, q_row, ok, position, k, v, first, end, seen, start, slots, p >= 0,
                                     scale, q_row, TILE, D, False)
        number = p
    else:
        prompt, tokens = held(entry, tail_ptr, x)
        count = tl.multiple_of(tl.load(entry + CHANNELS).to(tl.int32), STEP)
        total = tl.minimum(most, tl.cdiv(tokens, PER)) * PER
        size = tl.cdiv(tl.cdiv(total, shares), TILE) * TILE
        first, last = share * size, tl.minimum((share + 1) * size, total)
        mine, kept = chosen + (x * GROUP + g) * most, index + row * index_b + head * D
        if count <= 32:
            acc, m, z = _chosen(acc, m, z, base, q_row, ok, kept, entry, mine, prompt, tokens, first, last, count,
                                scale, 32, 0, TILE, D, PER, STEP)
        elif count <= 64:
            acc, m, z = _chosen(acc, m, z, base, q_row, ok, kept, entry, mine, prompt, tokens, first, last, count,
                                scale, 64, 0, TILE, D, PER, STEP)
        elif D > 64:
            if count <= 96:
                acc, m, z = _chosen(acc, m, z, base, q_row, ok, kept, entry, mine, prompt, tokens, first, last, count,
                                    scale, 64, 32, TILE, D, PER, STEP)
            else:
                acc, m, z = _chosen(acc, m, z, base, q_row, ok, kept, entry, mine, prompt, tokens, first, last, count,
                                    scale, 128, 0, TILE, D, PER, STEP)
        number = ends + share
    at = (x * parts + number) * ROWS + g_row
    tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
    tl.store(stat + 2 * at, m, mask=ok)
    tl.store(stat + 2 * at + 1, tl.sum(z, 1), mask=ok)
    tl.debug_barrier()  # all of it is written before the ticket says so
    if tl.atomic_add(done + x, 1, sem="acq_rel") == ends + GROUP * shares - 1:
        merged, _, _ = merge(part, stat, x * parts, parts, ROWS, MERGE_LINES, D)
        _store(out, merged, row, head, position_ptr, 1, 0, ROWS, GROUP, GROUP, H, D)
        tl.store(done + x, 0)
