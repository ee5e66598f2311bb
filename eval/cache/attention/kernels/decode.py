"""Decode attention over a compressed layer in one Triton launch: the fast path beside `batched.attend`.

Every program walks its span of the schedule (eval.cache.attention.schedule) and keeps an online softmax per (row, KV
head). Query channels are gathered here, so the model's weights stay as they are. The last program to finish a (row,
head) merges the partial results by log-sum-exp, so there is no second launch. Lengths are read from device tensors, so
that a captured CUDA graph can be replayed.

Names as in eval.cache.attention.kernels.parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from leank.eval.cache.attention.kernels.columns import (
    CHANNELS,
    FIELDS,
    FIRST,
    FIRST_NUMBER,
    FRESH,
    HEAD,
    K_START,
    KIND,
    LAST,
    NEXT,
    NUMBER,
    PARTIALS,
    ROW,
    SINK,
    TAIL,
    V_START,
    WIDTH,
    WINDOW,
)
from leank.eval.cache.attention.kernels.evict import logits_of, store_lse
from leank.eval.cache.attention.kernels.parts import (
    _gather,
    _kept_channels,
    columns,
    merge,
    ranks_of,
    real_rows,
    sink_and_window,
    step,
    store_rows,
    wait_for_previous_kernel,
)


class Form(NamedTuple):
    """What `decode` is compiled for."""

    H: int  # H, GROUP, D: KV heads, query heads of each, and channels of a head
    GROUP: int
    D: int
    TILE: int  # tokens of a tile
    M: int  # rows of a tile, a power of two
    ROWS: int  # how many of them, from the first on, can hold a query; a power of two
    MERGE_LINES: int  # partial results that a merge asks for at a time
    EVEN: bool  # whether every count of channels is a multiple of 32, so that the main loop needs no masks
    PAGE: int  # tokens of a page of the middle
    WARPS: int  # of a program
    VALUES: int  # the most channels that V keeps, rounded up to a power of two; 0 = V keeps all
    # whether to leave logits and log-sum-exp for `evict.add_weights`, which says what scratch and room are; then there
    # is one chunk of queries, and the middle is in 16 bits
    WEIGHTS: bool
    PDL: bool  # whether programmatic dependent launch is on (`parts.wait_for_previous_kernel`)


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
    """V tile of tokens at .. at + tokens - 1, zeros behind them unless the tile is whole: [T, P], or [T, VALUES]."""
    if VALUES == 0:
        d = tl.arange(0, triton.next_power_of_2(D))
        v_at = v + tl.multiple_of(at * D, PAGE) + (token[:, None] * D + d[None, :])
        if WHOLE and d.shape[0] == D:
            found = tl.load(v_at)
        else:
            found = tl.load(v_at, mask=columns(token < tokens, d, D), other=0.0)
    else:
        channel = tl.arange(0, VALUES)
        page = v + tl.multiple_of((at // PAGE) * (width * PAGE), PAGE)
        tile = _keys(page, channel, width, token, tokens, False, PAGE)
        found = tl.trans(tile) if WHOLE else tl.trans(tl.where((token < tokens)[None, :], tile, 0.0))
    return found


@triton.jit
def add_kept(acc, of_kept, m_before, m, ranks, D: tl.constexpr):
    """Add of_kept [M, VALUES] of maximum m to acc [M, P] of m_before; ranks: each channel's place, -1 = pruned."""
    rank = ranks_of(ranks, tl.arange(0, acc.shape[1]), D)
    place = tl.broadcast_to(tl.maximum(rank, 0)[None, :], acc.shape)
    found = tl.where((rank >= 0)[None, :], tl.gather(of_kept, place, 1), 0.0)
    return acc * tl.exp2(m_before - tl.where(m == float("-inf"), 0.0, m))[:, None] + found


@triton.jit
def middle(
    acc, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits,
    C0: tl.constexpr, C1: tl.constexpr, F: tl.constexpr,
):
    """Tokens [first, last) of a middle part with up to C0 + C1 channels; whole tiles without masks, then the rest.

    acc: [M, P], or [M, VALUES] where V is pruned to `width` channels, at most VALUES
    logits: [M], where the logit of the part's first token is written; used if WEIGHTS.
    """
    TILE: tl.constexpr = F.TILE
    EVEN: tl.constexpr = F.EVEN and C0 + C1 < 256  # the form for 256 channels is that for 224, too
    PAGE: tl.constexpr = F.PAGE
    token = tl.arange(0, TILE)
    c0 = tl.arange(0, C0)
    kept0 = _kept_channels(index, c0, count, EVEN)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        kept1 = _kept_channels(index, c1, count, EVEN)
    wait_for_previous_kernel(F.PDL)
    q0 = _gather(q_row, ok, kept0, c0, count, EVEN)
    if C1 > 0:
        q1 = _gather(q_row, ok, kept1, c1, count, EVEN)
    whole = first + (last - first) // TILE * TILE
    for at in range(first, whole, TILE):
        page = k + tl.multiple_of((at // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, TILE, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, TILE, EVEN, PAGE), s)
        if F.WEIGHTS:
            tl.store(logits[:, None] + (at + token)[None, :], s * scale, mask=ok[:, None])
        acc, m, z = step(acc, m, z, s * scale, _values(v, at, width, token, TILE, F.D, F.VALUES, PAGE, True))
    if whole < last:
        there = token < last - whole
        page = k + tl.multiple_of((whole // PAGE) * (count * PAGE), PAGE)
        s = tl.dot(q0, _keys(page, c0, count, token, last - whole, EVEN, PAGE))
        if C1 > 0:
            s = tl.dot(q1, _keys(page, c1, count, token, last - whole, EVEN, PAGE), s)
        s = tl.where(there[None, :], s * scale, float("-inf"))
        if F.WEIGHTS:
            tl.store(logits[:, None] + (whole + token)[None, :], s, mask=ok[:, None] & there[None, :])
        values = _values(v, whole, width, token, last - whole, F.D, F.VALUES, PAGE, False)
        acc, m, z = step(acc, m, z, s, values)
    return acc, m, z


@triton.jit
def _ends(acc, m, z, q_row, ok, layer, queries, k_at, v_at, first, last, row, t, ring, logits, F: tl.constexpr):
    """Slots [first, last) of row's sink or, if `ring`, window, k_at and v_at elements from base, for query tokens t."""
    k, v = tl.multiple_of(layer.base + k_at, 16), tl.multiple_of(layer.base + v_at, 16)
    wait_for_previous_kernel(F.PDL)
    position = tl.load(queries.position + row * queries.tokens + t, mask=ok, other=-1).to(tl.int32)
    seen = tl.load(layer.seen + row).to(tl.int32)
    start = tl.where(ring, tl.load(layer.start + row).to(tl.int32), 0)
    return sink_and_window(
        acc, m, z, q_row, ok, position, k, v, first, tl.minimum(last, seen), seen, start, layer.slots, ring,
        queries.scale, logits, F.TILE, F.D, F.WEIGHTS)


@triton.jit
def _read(
    acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale, logits,
    C0: tl.constexpr, C1: tl.constexpr, F: tl.constexpr,
):
    """Tokens [first, last) of a middle part with up to C0 + C1 channels of K, k_at and v_at elements from base.

    ranks, width: of the kept channels of V, at most VALUES; VALUES 0 = V has all its channels
    """
    k, v = tl.multiple_of(base + k_at, 16), tl.multiple_of(base + v_at, 16)
    if F.VALUES == 0:
        acc, m, z = middle(acc, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits, C0, C1, F)
    else:
        VALUES: tl.constexpr = F.VALUES
        before, of_kept = m, tl.zeros([acc.shape[0], VALUES], tl.float32)
        of_kept, m, z = middle(of_kept, m, z, q_row, ok, index, k, v, first, last, count, width, scale, logits,
                               C0, C1, F)
        acc = add_kept(acc, of_kept, before, m, ranks, F.D)
    return acc, m, z


@triton.jit
def _many(
    acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale, logits, F: tl.constexpr,
):
    """What `_kept` does for more than 96 channels of a head of more than 128."""
    if count <= 128:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 128, 0, F)
    elif count <= 160:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 128, 32, F)
    elif count <= 192:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 128, 64, F)
    elif F.D > 192:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 128, 128, F)
    return acc, m, z


@triton.jit
def _kept(
    acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale, logits, F: tl.constexpr,
):
    """Tokens [first, last) of a middle part in 16 bits, by the form for its number of channels."""
    if count <= 32:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 32, 0, F)
    elif count <= 64:
        acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                          logits, 64, 0, F)
    elif F.D > 64:
        if count <= 96:
            acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                              logits, 64, 32, F)
        elif F.D == 128:
            acc, m, z = _read(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                              logits, 128, 0, F)
        else:
            acc, m, z = _many(acc, m, z, q_row, ok, index, ranks, base, k_at, v_at, first, last, count, width, scale,
                              logits, F)
    return acc, m, z


@triton.jit
def _finish(
    results, partial, stat, scratch, queries, acc, m, z, ok, row, head, partials, number, first_number, places,
    F: tl.constexpr,
):
    """Leave partial result `number` of a (row, head) that has `partials`; the last to do so merges them into out.

    If a (row, head) has one partial result, it goes to `out` at once, without a ticket.
    partial, stat: of the program's chunk of queries
    """
    P: tl.constexpr = acc.shape[1]
    chunk, r, d = tl.program_id(1), tl.arange(0, F.M), tl.arange(0, P)
    if partials == 1:
        total = tl.sum(z, 1)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        real = real_rows(row, queries.position, queries.tokens, chunk, F.M, F.M, F.GROUP)
        store_rows(results.out, result, real, row, head, queries.tokens, chunk, F.M, F.M, F.GROUP, F.H, F.D)
        if F.WEIGHTS:
            store_lse(scratch, (row * F.H + head) * F.ROWS + r, m, total, ok)
    elif partials > 1:
        # asked for now, needed at the very end
        real = real_rows(row, queries.position, queries.tokens, chunk, F.ROWS, F.M, F.GROUP)
        at = number * F.ROWS + r
        tl.store(partial + at[:, None] * P + d[None, :], acc, mask=ok[:, None])
        tl.store(stat + 2 * at, m, mask=ok)
        tl.store(stat + 2 * at + 1, tl.sum(z, 1), mask=ok)
        tl.debug_barrier()  # all of it is written before the ticket says so
        ticket = results.done + chunk * places + row * F.H + head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == partials - 1:
            merged, most, total = merge(partial, stat, first_number, partials, F.ROWS, F.MERGE_LINES, P)
            store_rows(results.out, merged, real, row, head, queries.tokens, chunk, F.ROWS, F.M, F.GROUP, F.H, F.D)
            rows = tl.arange(0, F.ROWS)
            if F.WEIGHTS:
                store_lse(scratch, (row * F.H + head) * F.ROWS + rows, most, total, rows < F.GROUP * queries.tokens)
            tl.store(ticket, 0)


@triton.jit(do_not_specialize=["most", "places"])
def decode(
    layer, table, queries, results, scratch, room, most, places,
    F: tl.constexpr, READ: tl.constexpr, CODES: tl.constexpr,
):
    """Program (p, c): span p of the schedule for the query tokens of chunk c.

    layer, queries, results: of `parts`. table: the schedule, int64 [lines, FIELDS]
    scratch, room: where logits are left; see `evict`
    most: partial results of a chunk that there is room for. places: B * H
    F: a `Form`. CODES: what READ is compiled for
    READ: the function that reads a middle in fewer bits, with the parameters of `banded.read`; None = it is in 16 bits
    """
    M: tl.constexpr = F.M
    D: tl.constexpr = F.D
    P: tl.constexpr = triton.next_power_of_2(D)
    TILE: tl.constexpr = F.TILE
    PAGE: tl.constexpr = F.PAGE
    GROUP: tl.constexpr = F.GROUP
    PER: tl.constexpr = M // GROUP  # query tokens of a chunk
    chunk = tl.program_id(1)
    r = tl.arange(0, M)
    t = chunk * PER + r // GROUP
    ok = (r // GROUP < PER) & (t < queries.tokens)
    partial = results.partial + chunk.to(tl.int64) * most * F.ROWS * P
    stat = results.stat + chunk.to(tl.int64) * most * F.ROWS * 2
    acc = tl.zeros([M, P], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    line = tl.program_id(0).to(tl.int64)
    while line >= 0:
        entry = table + line * FIELDS
        kind, row, head = tl.load(entry + KIND), tl.load(entry + ROW), tl.load(entry + HEAD)
        first, last = tl.multiple_of(tl.load(entry + FIRST).to(tl.int32), PAGE), tl.load(entry + LAST).to(tl.int32)
        k_at, v_at = tl.load(entry + K_START), tl.load(entry + V_START)
        count, fresh = tl.load(entry + CHANNELS).to(tl.int32), tl.load(entry + FRESH)
        width = tl.load(entry + WIDTH).to(tl.int32)
        partials = tl.load(entry + PARTIALS).to(tl.int32)
        number, first_number = tl.load(entry + NUMBER), tl.load(entry + FIRST_NUMBER)
        line = tl.load(entry + NEXT)

        q_row = queries.q + row * queries.q_b + (head * GROUP + r % GROUP) * queries.q_h + t * queries.q_t
        m = tl.where(fresh != 0, float("-inf"), m)
        z = tl.where(fresh != 0, 0.0, z)
        acc = tl.where(fresh != 0, 0.0, acc)
        if F.WEIGHTS or READ is not None:  # what these read first, the previous kernel may write
            wait_for_previous_kernel(F.PDL)
        logits = scratch  # not written
        if F.WEIGHTS:
            logits = logits_of(scratch, room, layer.seen, layer.start, layer.tail, row, row * F.H + head, places, r,
                               layer.sink, kind != SINK, kind == WINDOW, F.ROWS)
        if kind <= WINDOW:  # sink or window
            acc, m, z = _ends(acc, m, z, q_row, ok, layer, queries, k_at, v_at, first, last, row, t, kind == WINDOW,
                              logits, F)
        else:
            if kind == TAIL:
                wait_for_previous_kernel(F.PDL)  # it may be `move`
                last = tl.minimum(last, tl.load(layer.tail + row * F.H + head).to(tl.int32))
            kept = layer.index + row * layer.index_b + head * D
            if READ is not None:
                acc, m, z = READ(acc, m, z, q_row, ok, kept, layer, entry, k_at, v_at, first, last,
                                 queries.scale, F, CODES)
            else:
                acc, m, z = _kept(acc, m, z, q_row, ok, kept, layer.ranks + row * layer.ranks_b + head * D,
                                  layer.base, k_at, v_at, first, last, count, width, queries.scale, logits, F)
        _finish(results, partial, stat, scratch, queries, acc, m, z, ok, row, head, partials, number, first_number,
                places, F)
