"""Decode attention over the pages of a served cache, and writing new tokens to them, in one Triton launch each.

A program takes one (row, KV head) and one split of its tokens: an equal share of the middle, of which only the kept
group is read, and an equal share of the sink and window, of which both groups are read. The last program to finish a
(row, head) merges the partial results by log-sum-exp. Lengths and block tables are read on the device and the grid
depends on the number of rows alone, so that a captured CUDA graph can be replayed while requests grow.

Names as in eval.cache.attention.kernel; the page layout and its runs are those of eval.serving.layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention.kernel import merge
from eval.cache.attention.kernel_middle import step

RUN = tl.constexpr(16)  # columns: every offset within a page is a multiple of them

# fmt: off


@triton.jit
def _head_runs(runs, head):
    """Start and width of a head's K run, its channels, start and width of its V run."""
    at = runs + head * 5
    return (tl.multiple_of(tl.load(at), RUN), tl.multiple_of(tl.load(at + 1), RUN), tl.load(at + 2),
            tl.multiple_of(tl.load(at + 3), RUN), tl.multiple_of(tl.load(at + 4), RUN))


@triton.jit
def _channels_of(q_row, ok, channels, c, count):
    """Query channels [M, C] of a run; zero past `count`."""
    index = tl.load(channels + c, mask=c < count, other=0)
    return tl.load(q_row[:, None] + index[None, :], mask=ok[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _lines(table, token, there, start, width, page, BLOCK: tl.constexpr):
    """Offset [T] of each token's line of a run."""
    number = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
    return tl.multiple_of(number * page, RUN) + BLOCK * start + (token % BLOCK) * width


@triton.jit
def _run(pages, line, there, c, count):
    """Columns c [C] of a run at the lines [T]: [T, C], zero where not there."""
    return tl.load(pages + line[:, None] + c[None, :], mask=there[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _middle(
    acc, m, z, pages, q_row, ok, channels, table, first, last, k_start, k_width, count, v_start, v_width, page, scale,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Tokens [first, last) of the middle: the kept group alone, up to C0 + C1 channels."""
    c0, d = tl.arange(0, C0), tl.arange(0, D)
    q0 = _channels_of(q_row, ok, channels, c0, count)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        q1 = _channels_of(q_row, ok, channels, c1, count)
    for at in range(first, last, TILE):
        token = at + tl.arange(0, TILE)
        there = token < last
        number = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        base = tl.multiple_of(number * page, RUN)
        slot = token % BLOCK
        k_line = base + BLOCK * k_start + slot * k_width
        s = tl.dot(q0, tl.trans(_run(pages, k_line, there, c0, k_width)))
        if C1 > 0:
            s = tl.dot(q1, tl.trans(_run(pages, k_line, there, c1, k_width)), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        acc, m, z = step(acc, m, z, s, _run(pages, base + BLOCK * v_start + slot * v_width, there, d, D))
    return acc, m, z


@triton.jit
def _whole(
    acc, m, z, pages, q_row, ok, first, last, sink, window_from, page, scale,
    kept, kept_channels, k_start, k_width, k_count, kv_start, kv_width,
    rest, rest_channels, r_start, r_width, r_count, rv_start, rv_width,
    TILE: tl.constexpr, D: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Tokens number first .. last - 1 of the sink and, behind it, the window: both groups, all channels."""
    d = tl.arange(0, D)
    q_kept = _channels_of(q_row, ok, kept_channels, d, k_count)
    q_rest = _channels_of(q_row, ok, rest_channels, d, r_count)
    for at in range(first, last, TILE):
        n = at + tl.arange(0, TILE)
        there = n < last
        token = tl.where(n < sink, n, window_from + n - sink)
        k_line = _lines(kept, token, there, k_start, k_width, page, KEPT_BLOCK)
        r_line = _lines(rest, token, there, r_start, r_width, page, REST_BLOCK)
        s = tl.dot(q_kept, tl.trans(_run(pages, k_line, there, d, k_width)))
        s = tl.dot(q_rest, tl.trans(_run(pages, r_line, there, d, r_width)), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        if kv_width > 0:
            v_line = _lines(kept, token, there, kv_start, kv_width, page, KEPT_BLOCK)
        else:
            v_line = _lines(rest, token, there, rv_start, rv_width, page, REST_BLOCK)
        acc, m, z = step(acc, m, z, s, _run(pages, v_line, there, d, D))
    return acc, m, z


@triton.jit
def _share(total, split, splits, TILE: tl.constexpr):
    """First and last of a split's share of `total` tokens, whole tiles but for the last."""
    share = tl.cdiv(tl.cdiv(total, splits), TILE) * TILE
    first = tl.minimum(split * share, total)
    return first, tl.minimum(first + share, total)


@triton.jit
def decode(
    pages, q, out, lengths, kept_tables, rest_tables, work, kept_runs, kept_channels, rest_runs, rest_channels,
    part, stat, done, scale, page, q_b, q_h, kept_b, rest_b, kept_w, rest_w, sink_size, window, programs,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    MERGE_LINES: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Program (p, b): a split of a head of row b, as line p of `work` says.

    q: [B, H * GROUP, D], by strides. out: [B, H * GROUP, D].
    lengths: int32 [B], tokens of a row, the query's own included; 0 = no row.
    work: int32 [programs, 4], head, split, splits of the head, and the head's first line.
    part, stat: [B * programs, ROWS, D] and [.., ROWS, 2] fp32. done: [B * H] int32, zeros before and after.
    page: elements of a page. kept_w, rest_w: columns of the channel tables.
    """
    p, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    page = tl.multiple_of(page.to(tl.int64), RUN)
    head, split = tl.load(work + p * 4), tl.load(work + p * 4 + 1)
    splits, first_line = tl.load(work + p * 4 + 2), tl.load(work + p * 4 + 3)
    length = tl.load(lengths + b)
    r, d = tl.arange(0, M), tl.arange(0, D)
    ok = r < GROUP
    q_row = q + b * q_b + (head * GROUP + r) * q_h
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    k_start, k_width, k_count, kv_start, kv_width = _head_runs(kept_runs, head)
    r_start, r_width, r_count, rv_start, rv_width = _head_runs(rest_runs, head)
    kept, rest = kept_tables + b * kept_b, rest_tables + b * rest_b
    sink = tl.minimum(sink_size, length)
    window_from = tl.maximum(sink, length - 1 - window)
    of_kept, of_rest = kept_channels + head * kept_w, rest_channels + head * rest_w

    first, last = _share(tl.where(k_width > 0, window_from - sink, 0), split, splits, TILE)
    first, last = sink + first, sink + last
    if k_width <= 32:
        acc, m, z = _middle(acc, m, z, pages, q_row, ok, of_kept, kept, first, last, k_start, k_width, k_count,
                            kv_start, kv_width, page, scale, 32, 0, TILE, D, KEPT_BLOCK)
    elif k_width <= 64:
        acc, m, z = _middle(acc, m, z, pages, q_row, ok, of_kept, kept, first, last, k_start, k_width, k_count,
                            kv_start, kv_width, page, scale, 64, 0, TILE, D, KEPT_BLOCK)
    elif D > 64:
        if k_width <= 96:
            acc, m, z = _middle(acc, m, z, pages, q_row, ok, of_kept, kept, first, last, k_start, k_width, k_count,
                                kv_start, kv_width, page, scale, 64, 32, TILE, D, KEPT_BLOCK)
        else:
            acc, m, z = _middle(acc, m, z, pages, q_row, ok, of_kept, kept, first, last, k_start, k_width, k_count,
                                kv_start, kv_width, page, scale, 128, 0, TILE, D, KEPT_BLOCK)
    first, last = _share(sink + length - window_from, split, splits, TILE)
    acc, m, z = _whole(acc, m, z, pages, q_row, ok, first, last, sink, window_from, page, scale,
                       kept, of_kept, k_start, k_width, k_count, kv_start, kv_width,
                       rest, of_rest, r_start, r_width, r_count, rv_start, rv_width, TILE, D, KEPT_BLOCK, REST_BLOCK)

    to = out + b * (H * GROUP * D) + (head * GROUP + r)[:, None] * D + d[None, :]
    total = tl.sum(z, 1)
    if splits == 1:
        tl.store(to, (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty), mask=ok[:, None])
    else:
        at = (b * programs + p) * ROWS + r
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
        tl.store(stat + 2 * at, m, mask=ok)
        tl.store(stat + 2 * at + 1, total, mask=ok)
        tl.debug_barrier()  # all of it is written before the ticket says so
        ticket = done + b * H + head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == splits - 1:
            merged, _, _ = merge(part, stat, b * programs + first_line, splits, ROWS, MERGE_LINES, D)
            rows = tl.arange(0, ROWS)
            place = out + b * (H * GROUP * D) + (head * GROUP + rows)[:, None] * D + d[None, :]
            tl.store(place, merged.to(out.dtype.element_ty), mask=(rows < GROUP)[:, None])
            tl.store(ticket, 0)


@triton.jit
def _store(pages, source, slot, channels, start, width, count, page, BLOCK: tl.constexpr, D: tl.constexpr):
    """One token's run: the channels picked from source [D], then zeros."""
    c = tl.arange(0, D)
    index = tl.load(channels + c, mask=c < count, other=0)
    value = tl.load(source + index, mask=c < count, other=0.0)
    line = pages + (slot // BLOCK) * page + BLOCK * start + (slot % BLOCK) * width
    tl.store(line + c, value.to(pages.dtype.element_ty), mask=c < width)


@triton.jit
def write(
    pages, k, v, kept_slots, rest_slots, kept_runs, kept_channels, rest_runs, rest_channels, every_channel,
    page, k_t, k_h, v_t, v_h, kept_w, rest_w,
    D: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Program (t, h): put head h of token t of k and v [n, H, D], by strides, where both groups hold it.

    kept_slots, rest_slots: int64 [n]; a slot of the null block or below stores nothing.
    every_channel: int32 [D], 0 .. D - 1, the channels of a V run.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = page.to(tl.int64)
    k += t * k_t + head * k_h
    v += t * v_t + head * v_h
    slot = tl.load(kept_slots + t)
    if slot >= KEPT_BLOCK:
        k_start, k_width, k_count, v_start, v_width = _head_runs(kept_runs, head)
        _store(pages, k, slot, kept_channels + head * kept_w, k_start, k_width, k_count, page, KEPT_BLOCK, D)
        _store(pages, v, slot, every_channel, v_start, v_width, v_width, page, KEPT_BLOCK, D)
    slot = tl.load(rest_slots + t)
    if slot >= REST_BLOCK:
        k_start, k_width, k_count, v_start, v_width = _head_runs(rest_runs, head)
        _store(pages, k, slot, rest_channels + head * rest_w, k_start, k_width, k_count, page, REST_BLOCK, D)
        _store(pages, v, slot, every_channel, v_start, v_width, v_width, page, REST_BLOCK, D)
