"""Decode attention over a sealed layer in one Triton launch: the fast path beside `reference.attend`.

Every program walks its span of the work table (eval.cache.attention.work) and keeps an online softmax per (row, KV
head). Query channels are gathered here, so the model's weights stay as they are. The last program to finish a (row,
head) merges the partial results by log-sum-exp, so there is no second launch. Lengths are read from device tensors, so
that a captured CUDA graph can be replayed.

Names: a tile has M rows (query token, head of the group) and T tokens; m, z and acc are the running maximum,
denominator and numerator of the softmax, base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention import work
from leank.eval.cache.attention.kernel_middle import add_kept, middle, step, wait_for_the_launch_ahead
from leank.eval.cache.attention.quantised_kernel import packed_middle
from leank.eval.cache.attention.weights_kernel import logits_of, store_lse

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
def sink_and_window(
    acc, m, z, q_row, ok, position, k, v, first, last, seen, start, slots, ring, scale, logits,
    TILE: tl.constexpr, D: tl.constexpr, WEIGHTS: tl.constexpr,
):
    """Slots [first, last) of the sink (slot = token) or the window's ring (slot = token mod slots), all channels.

    logits: [M], where the logit of token 0 would be written; used if WEIGHTS.
    """
    tile, d = tl.arange(0, TILE), tl.arange(0, D)
    q = tl.load(q_row[:, None] + d[None, :], mask=ok[:, None], other=0.0)
    offset = tile[:, None] * D + d[None, :]
    newest = seen - 1
    turn = tl.where(ring, newest - newest % slots, 0)  # token of the ring's slot 0, this time round
    ahead = tl.where(ring, newest % slots, last)  # slots after this one are from the time before
    for at in range(first, last, TILE):
        slot = at + tile
        token = turn + slot - tl.where(slot > ahead, slots, 0)
        there = (slot < last) & (token >= start)
        keys = tl.load(k + at * D + offset, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(keys)) * scale
        s = tl.where(there[None, :] & (token[None, :] <= position[:, None]), s, float("-inf"))
        if WEIGHTS:
            tl.store(logits[:, None] + token[None, :], s, mask=ok[:, None] & there[None, :])
        acc, m, z = step(acc, m, z, s, tl.load(v + at * D + offset, mask=there[:, None], other=0.0))
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
def merge(part, stat, first, parts, ROWS: tl.constexpr, MERGE_LINES: tl.constexpr, D: tl.constexpr):
    """Combine partial results first .. first + parts - 1 by log-sum-exp.

    A thread has four columns of a row in every partial result, and that row's maxima and denominators, so that threads
    exchange nothing. It asks for MERGE_LINES partial results before it waits for one.

    Returns [ROWS, D], zero where nothing was seen, and the maximum and denominator [ROWS].
    """
    PLACES: tl.constexpr = ROWS * D // 4
    place = tl.arange(0, PLACES)
    part += first * (ROWS * D) + (place * 4)[:, None] + tl.arange(0, 4)[None, :]
    stat = (stat + first * (2 * ROWS)).to(tl.pointer_type(tl.int64), bitcast=True) + place // (D // 4)
    acc = tl.zeros([PLACES, 4], tl.float32)
    m = tl.full([PLACES], float("-inf"), tl.float32)
    z = tl.zeros([PLACES], tl.float32)
    for at in range(0, parts, MERGE_LINES):
        new = m
        accs = tl.tuple([])
        pairs = tl.tuple([])
        for i in tl.static_range(MERGE_LINES):
            there = i * PLACES + place < (parts - at) * PLACES
            pairs += (tl.load(stat + i * ROWS, mask=there, other=0xFF800000, cache_modifier=".cg"),)  # -inf and 0
            accs += (tl.load(part + i * (ROWS * D), mask=there[:, None], other=0.0, cache_modifier=".cg"),)
        for i in tl.static_range(MERGE_LINES):
            new = tl.maximum(new, pairs[i].to(tl.int32).to(tl.float32, bitcast=True))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(m - safe)
        acc, z, m = acc * alpha[:, None], z * alpha, new
        for i in tl.static_range(MERGE_LINES):
            weight = tl.exp2(pairs[i].to(tl.int32).to(tl.float32, bitcast=True) - safe)
            acc += accs[i] * weight[:, None]
            z += (pairs[i] >> 32).to(tl.int32).to(tl.float32, bitcast=True) * weight
        part += MERGE_LINES * ROWS * D
        stat += MERGE_LINES * ROWS
    result = tl.reshape(acc / tl.where(z == 0.0, 1.0, z)[:, None], [ROWS, D])
    return result, tl.max(tl.reshape(m, [ROWS, D // 4]), 1), tl.max(tl.reshape(z, [ROWS, D // 4]), 1)


@triton.jit
def real_rows(row, position_ptr, queries, chunk, R: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr):
    """Which of the first R tile rows are of queries that are no padding, [R]."""
    r = tl.arange(0, R)
    token = chunk * (M // GROUP) + r // GROUP
    ok = (r // GROUP < M // GROUP) & (token < queries)
    return tl.load(position_ptr + row * queries + token, mask=ok, other=-1) >= 0


@triton.jit
def store_rows(
    out, result, real, row, head, queries, chunk,
    R: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):
    """Write the first R tile rows of result [R, D] to out [B, Q, Hq, D]; queries that are not `real` get zeros."""
    r = tl.arange(0, R)
    token = chunk * (M // GROUP) + r // GROUP
    ok = (r // GROUP < M // GROUP) & (token < queries)
    to = ((row * queries + token) * (H * GROUP) + head * GROUP + r % GROUP)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + to, tl.where(real[:, None], result, 0.0).to(out.dtype.element_ty), mask=ok[:, None])


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
    WEIGHTS: whether to leave logits and log-sum-exp for weights_kernel.add_weights, which says what scratch and room
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
