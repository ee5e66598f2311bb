"""Decode attention over a sealed layer in one Triton launch: the fast path beside `naive.attend`.

Every program walks its span of the work table (eval.cache.attention.work) and keeps an online softmax per (row, KV
head). Query channels are gathered here, so the model's weights stay as they are. The last program to finish a (row,
head) merges the partial results by log-sum-exp, so there is no second launch. Lengths are read from device tensors, so
that a captured CUDA graph can be replayed.

Names as in eval.cache.attention.kernels.parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import work
from leank.eval.cache.attention.kernels.evict import logits_of, store_lse
from leank.eval.cache.attention.kernels.packed import packed_middle
from leank.eval.cache.attention.kernels.parts import (
    _gather,
    _kept_channels,
    merge,
    real_rows,
    sink_and_window,
    step,
    store_rows,
    wait_for_the_launch_ahead,
)

# What the kernel reads of the work table, as constants that Triton compiles in.
SINK, WINDOW, TAIL = tl.constexpr(work.SINK), tl.constexpr(work.WINDOW), tl.constexpr(work.TAIL)
PART = tl.constexpr(int(work.Column.PART))
ROW = tl.constexpr(int(work.Column.ROW))
HEAD = tl.constexpr(int(work.Column.HEAD))
FIRST = tl.constexpr(int(work.Column.FIRST))
LAST = tl.constexpr(int(work.Column.LAST))
K_START = tl.constexpr(int(work.Column.K_START))
V_START = tl.constexpr(int(work.Column.V_START))
CHANNELS = tl.constexpr(int(work.Column.CHANNELS))
FRESH = tl.constexpr(int(work.Column.FRESH))
PARTIALS = tl.constexpr(int(work.Column.PARTIALS))
NUMBER = tl.constexpr(int(work.Column.NUMBER))
FIRST_NUMBER = tl.constexpr(int(work.Column.FIRST_NUMBER))
NEXT = tl.constexpr(int(work.Column.NEXT))
WIDTH = tl.constexpr(int(work.Column.WIDTH))

# fmt: off


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


@triton.jit
def _ends(
    acc, m, z, q_row, ok, base, seen_ptr, start_ptr, position_ptr, k_at, v_at, first, last, row, t, ring, queries,
    slots, scale, logits,
    TILE: tl.constexpr, D: tl.constexpr, WEIGHTS: tl.constexpr, EARLY: tl.constexpr,
):
    """Slots [first, last) of row's sink or, if `ring`, window, k_at and v_at elements from base, for query tokens t."""
    k, v = tl.multiple_of(base + k_at, 16), tl.multiple_of(base + v_at, 16)
    wait_for_the_launch_ahead(EARLY)
    position = tl.load(position_ptr + row * queries + t, mask=ok, other=-1).to(tl.int32)
    seen = tl.load(seen_ptr + row).to(tl.int32)
    start = tl.where(ring, tl.load(start_ptr + row).to(tl.int32), 0)
    return sink_and_window(
        acc, m, z, q_row, ok, position, k, v, first, tl.minimum(last, seen), seen, start, slots, ring, scale, logits,
        TILE, D, WEIGHTS)


@triton.jit
def _read(
    acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale, logits,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, WEIGHTS: tl.constexpr, EARLY: tl.constexpr,
):
    """Tokens [first, last) of a middle part with up to C0 + C1 channels of K, k_at and v_at elements from base.

    ranks, width: of the kept channels of V, at most VALUES; VALUES 0 = V has all its channels
    """
    k, v = tl.multiple_of(base + k_at, 16), tl.multiple_of(base + v_at, 16)
    if VALUES == 0:
        acc, m, z = middle(acc, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits,
                           C0, C1, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
    else:
        before, of_kept = m, tl.zeros([acc.shape[0], VALUES], tl.float32)
        of_kept, m, z = middle(of_kept, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits,
                               C0, C1, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
        acc = add_kept(acc, of_kept, before, m, ranks, D)
    return acc, m, z


@triton.jit
def _kept(
    acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale, logits,
    TILE: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr, PAGE: tl.constexpr,
    WEIGHTS: tl.constexpr, EARLY: tl.constexpr,
):
    """Tokens [first, last) of a middle part in 16 bits, by the form for its number of channels."""
    if count <= 32:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 32, 0, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
    elif count <= 64:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 64, 0, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
    elif D > 64:
        if count <= 96:
            acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                              logits, 64, 32, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
        else:
            acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                              logits, 128, 0, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
    return acc, m, z


@triton.jit
def _finish(
    out, part, stat, done, scratch, position_ptr, acc, m, z, ok, row, head, parts, number, first_number, places,
    queries,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    MERGE_LINES: tl.constexpr, WEIGHTS: tl.constexpr,
):
    """Leave partial result `number` of a (row, head) that has `parts`; the last program to do so merges them into out.

    The only partial result of a (row, head) is its result. part, stat and done are those of `decode`.
    """
    chunk, r, d = tl.program_id(1), tl.arange(0, M), tl.arange(0, D)
    if parts == 1:
        total = tl.sum(z, 1)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        real = real_rows(row, position_ptr, queries, chunk, M, M, GROUP)
        store_rows(out, result, real, row, head, queries, chunk, M, M, GROUP, H, D)
        store_lse(scratch, (row * H + head) * ROWS + r, m, total, ok, WEIGHTS)
    elif parts > 1:
        real = real_rows(row, position_ptr, queries, chunk, ROWS, M, GROUP)  # asked for now, needed at the very end
        at = number * ROWS + r
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
        tl.store(stat + 2 * at, m, mask=ok)
        tl.store(stat + 2 * at + 1, tl.sum(z, 1), mask=ok)
        tl.debug_barrier()  # all of it is written before the ticket says so
        ticket = done + chunk * places + row * H + head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == parts - 1:
            merged, most, total = merge(part, stat, first_number, parts, ROWS, MERGE_LINES, D)
            store_rows(out, merged, real, row, head, queries, chunk, ROWS, M, GROUP, H, D)
            rows = tl.arange(0, ROWS)
            store_lse(scratch, (row * H + head) * ROWS + rows, most, total, rows < GROUP * queries, WEIGHTS)
            tl.store(ticket, 0)


@triton.jit(do_not_specialize=["partials", "places"])
def decode(
    base, bytes_base, q, out, index, ranks, table, seen_ptr, start_ptr, tail_ptr, position_ptr, part, stat, done,
    scratch, room, scale, q_b, q_h, q_t, index_b, ranks_b, queries, partials, places, slots, sink,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    MERGE_LINES: tl.constexpr, EVEN: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
    BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr, WARPS: tl.constexpr, VALUES: tl.constexpr,
    WEIGHTS: tl.constexpr, EARLY: tl.constexpr,
):
    """Program (p, c): span p of the work table for the query tokens of chunk c.

    base, bytes_base: first element of the ring's keys; the same address as a pointer to bytes
    table: [lines, FIELDS] int64, with the columns of work.Column
    q: [B, Hq, Q, D], by strides
    out: [B, Q, Hq, D]
    part, stat: [chunks, partials, ROWS, D] and [chunks, partials, ROWS, 2] fp32, partial results
    done: [chunks, places] int32, zeros before and after; places = B * H
    BITS, CELL: bits of a number of the middle, and numbers in a cell; 0 = not packed
    PTX: whether a packed middle is unpacked in PTX, which Triton's interpreter cannot run
    WARPS: of a program
    VALUES: the most channels that the middle's V has, rounded up to a power of two; 0 = every channel
    ranks: [B, H, D], by a stride; the place of each channel of V among the kept, read unless VALUES is 0
    WEIGHTS: whether to leave logits and log-sum-exp for evict.add_weights, which says what scratch and room
        are; there is one chunk then, and no packed middle
    EARLY: whether programs take their places before the launch ahead has ended, and let the next launch's do so
    """
    chunk = tl.program_id(1)
    PER: tl.constexpr = M // GROUP  # query tokens of a chunk
    r = tl.arange(0, M)
    t = chunk * PER + r // GROUP
    ok = (r // GROUP < PER) & (t < queries)
    part += chunk.to(tl.int64) * partials * ROWS * D
    stat += chunk.to(tl.int64) * partials * ROWS * 2
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    line = tl.program_id(0).to(tl.int64)
    while line >= 0:
        entry = table + line * FIELDS
        kind, row, head = tl.load(entry + PART), tl.load(entry + ROW), tl.load(entry + HEAD)
        first, last = tl.multiple_of(tl.load(entry + FIRST).to(tl.int32), PAGE), tl.load(entry + LAST).to(tl.int32)
        k_at, v_at = tl.load(entry + K_START), tl.load(entry + V_START)
        count, fresh = tl.load(entry + CHANNELS).to(tl.int32), tl.load(entry + FRESH)
        width = tl.load(entry + WIDTH).to(tl.int32)
        parts = tl.load(entry + PARTIALS).to(tl.int32)
        number, first_number = tl.load(entry + NUMBER), tl.load(entry + FIRST_NUMBER)
        line = tl.load(entry + NEXT)

        q_row = q + row * q_b + (head * GROUP + r % GROUP) * q_h + t * q_t
        m = tl.where(fresh != 0, float("-inf"), m)
        z = tl.where(fresh != 0, 0.0, z)
        acc = tl.where(fresh != 0, 0.0, acc)
        if WEIGHTS or BITS > 0:  # what these read first, the launch ahead may write
            wait_for_the_launch_ahead(EARLY)
        logits = logits_of(scratch, room, seen_ptr, start_ptr, tail_ptr, row, row * H + head, places, r, sink,
                           kind != SINK, kind == WINDOW, ROWS, WEIGHTS)
        if kind <= WINDOW:  # sink or window
            acc, m, z = _ends(acc, m, z, q_row, ok, base, seen_ptr, start_ptr, position_ptr, k_at, v_at, first, last,
                              row, t, kind == WINDOW, queries, slots, scale, logits, TILE, D, WEIGHTS, EARLY)
        else:
            if kind == TAIL:
                wait_for_the_launch_ahead(EARLY)  # it may be `move`
                last = tl.minimum(last, tl.load(tail_ptr + row * H + head).to(tl.int32))
            kept, of_v = index + row * index_b + head * D, ranks + row * ranks_b + head * D
            if BITS > 0:
                acc, m, z = packed_middle(acc, m, z, q_row, ok, kept, base, bytes_base, k_at, v_at, first, last, count,
                                          scale, ROWS, TILE, D, EVEN, PAGE, BITS, CELL, PTX, WARPS)
            else:
                acc, m, z = _kept(acc, m, z, q_row, ok, kept, of_v, base, k_at, v_at, first, last, count, width, scale,
                                  logits, TILE, D, VALUES, EVEN, PAGE, WEIGHTS, EARLY)
        _finish(out, part, stat, done, scratch, position_ptr, acc, m, z, ok, row, head, parts, number, first_number,
                places, queries, H, GROUP, D, M, ROWS, MERGE_LINES, WEIGHTS)
