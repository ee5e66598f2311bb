"""Decode attention over the pages of a served cache, and writing new tokens to them, in one Triton launch each.

The tiles of all rows and heads follow each other on one line: row by row, head by
head, the ends of a head before its middle. On this line a tile is as long as the columns that it reads; the first of
the ends and the first of the middle are START longer, which is what it costs to begin. Programs have equal spans of the
line, and a tile belongs to the program in whose span it begins. So all programs read about the same number of bytes.

What a program reads of one (row, head) is a partial result, unless it reads all of it. The last program to finish a
(row, head) merges its partial results by log-sum-exp. Each program finds its span by itself, from lengths and block
tables on the device, and the grid is fixed, so that a captured CUDA graph can be replayed while requests come, grow
and go.

A tile is TILE tokens that begin at a multiple of TILE, so that one lookup in the block table serves it if a page holds
whole tiles, and two or four if a page holds a half or a quarter. Other pages are looked up token by token. Tiles are of
two kinds:

    ends     tiles with a token of the sink or the window: their tokens are told apart one by one
    middle   all others, which lie in one piece: every token is there, and only the kept group is read, without a mask

A tile's pages are looked up while the tile before it is loaded, so that Triton keeps several tiles under way.

Names as in eval.cache.attention.kernels.parts. The page layout and its stripes are those of eval.serving.layout; a
stripe is here a tuple of its first column, its width, its channels, and the first column of the head's V stripe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from leank.eval.cache.attention.kernels.banded import OF_HEAD
from leank.eval.cache.attention.kernels.parts import merge, step

OF_BANDS = tl.constexpr(OF_HEAD.value + 2)  # numbers of a head in `bands`: as a cache has them, and two more
STRIPE = tl.constexpr(16)  # columns: every offset within a page is a multiple of them


class Group(NamedTuple):
    """One of the two groups of pages, for one layer."""

    tables: Any  # int32 [batch, blocks], with the stride tables_b; the pages of each row
    stripes: Any  # int32 [H, 5], `PageGroup.table`; of codes, `CodedLayout.table`
    channels: Any  # int32 [H, width], `PageGroup.channels`; of codes, the channels in their order
    tables_b: int
    width: int


class Form(NamedTuple):
    """What `decode` is compiled for."""

    H: int  # H, GROUP, D: KV heads, query heads of each, and channels of a head
    GROUP: int
    D: int
    HEADS: int  # HEADS, BATCH: powers of two, at least H and the batch
    BATCH: int
    TILE: int  # tokens of a tile
    START: int  # what it costs to begin to read, in units of STRIPE columns of a tile
    EVEN: bool  # whether every head keeps a multiple of 32 channels
    M: int  # M, ROWS: rows of a tile, and of a partial result; powers of two, at least GROUP
    ROWS: int
    MERGE_LINES: int  # partial results that a merge asks for at a time
    KEPT_BLOCK: int  # KEPT_BLOCK, REST_BLOCK: tokens of a page of each group
    REST_BLOCK: int
    PAGE: int = 64  # tokens of a page of codes
    WARPS: int = 4  # of a program


# fmt: off


@triton.jit
def stripe_of(stripes, head):
    """The stripe of a head, from the table of its group."""
    at = stripes + head * 5
    return (tl.multiple_of(tl.load(at), STRIPE), tl.multiple_of(tl.load(at + 1), STRIPE), tl.load(at + 2),
            tl.multiple_of(tl.load(at + 3), STRIPE))


@triton.jit
def window_from(first, sink, window, GRAIN: tl.constexpr):
    """Where the window of a step from position `first` on begins: `rest.window_start`, but not in the sink."""
    return tl.maximum(sink, tl.maximum(first - window, 0) // GRAIN * GRAIN)


@triton.jit
def tiles_of(length, sink_size, window, TILE: tl.constexpr):
    """A row's tiles, how many of them begin in the sink, and how many of those that follow are of the middle."""
    sink = tl.minimum(sink_size, length)
    in_sink = tl.cdiv(sink, TILE)
    return tl.cdiv(length, TILE), in_sink, tl.maximum(window_from(length - 1, sink, window, 1) // TILE - in_sink, 0)


@triton.jit
def _query(q_row, ok, channels, c, stripe):
    """Query channels [M, C] of the columns c of a stripe; zero where these hold zeros."""
    index = tl.load(channels + c, mask=c < stripe[2], other=0)
    return tl.load(q_row[:, None] + index[None, :], mask=ok[:, None] & (c < stripe[2])[None, :], other=0.0)


@triton.jit
def _look_up(table, tile, newest, t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a tile's quarters; where pages hold no quarters, the page of each token [T] instead.

    newest: the row's last token, behind whose page the table may hold anything
    """
    last = tl.maximum(newest, 0) // BLOCK
    if BLOCK % TILE == 0:
        first = tl.load(table + tile // (BLOCK // TILE))
        return first, first, first, first
    elif BLOCK * 2 == TILE:
        first, third = tl.load(table + tile * 2), tl.load(table + tl.minimum(tile * 2 + 1, last))
        return first, first, third, third
    elif BLOCK * 4 == TILE:
        return (tl.load(table + tile * 4), tl.load(table + tl.minimum(tile * 4 + 1, last)),
                tl.load(table + tl.minimum(tile * 4 + 2, last)), tl.load(table + tl.minimum(tile * 4 + 3, last)))
    else:
        each = tl.load(table + tl.minimum((tile * TILE + t) // BLOCK, last))
        return each, each, each, each


@triton.jit
def _pages_at(pages, page, number, t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointer to the page of a tile, or of each of its tokens [T]."""
    if TILE % BLOCK == 0 and BLOCK * 4 >= TILE and BLOCK < TILE:
        low, high = number[0].to(tl.int64) * page, number[2].to(tl.int64) * page
        if BLOCK * 4 == TILE:
            low = tl.where(t < BLOCK, low, number[1].to(tl.int64) * page)
            high = tl.where(t < 3 * BLOCK, high, number[3].to(tl.int64) * page)
        return pages + tl.multiple_of(tl.where(t < TILE // 2, low, high), STRIPE)
    else:
        return pages + number[0].to(tl.int64) * page


@triton.jit
def _at(pages, page, number, tile, start, width, t, c, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers [T, C] to columns c of a tile's tokens in a stripe."""
    base = _pages_at(pages, page, number, t, TILE, BLOCK) + BLOCK * start
    if BLOCK % TILE == 0:
        return base + tile % (BLOCK // TILE) * TILE * width + (t[:, None] * width + c[None, :])
    else:
        return (base + (tile * TILE + t) % BLOCK * width)[:, None] + c[None, :]


@triton.jit
def _logits(
    s, q, pages, page, number, tile, stripe, t, c, EVEN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add q [M, C] times columns c of a K stripe to s [M, T]."""
    at = _at(pages, page, number, tile, stripe[0], stripe[1], t, c, TILE, BLOCK)
    k = tl.load(at) if EVEN else tl.load(at, mask=(c < stripe[1])[None, :], other=0.0)
    return tl.dot(q, tl.trans(k), s)


@triton.jit
def _middle(
    acc, m, z, number, q0, q1, pages, page, table, first, last, newest, stripe, scale,
    C0: tl.constexpr, C1: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """Tiles [first, last) of the middle, of which up to C0 + C1 channels are kept. number: the first tile's pages."""
    t, d, c0 = tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, C0)
    for tile in range(first, last):
        ahead = _look_up(table, tl.minimum(tile + 1, last - 1), newest, t, TILE, BLOCK)
        s = tl.zeros([q0.shape[0], TILE], tl.float32)
        s = _logits(s, q0, pages, page, number, tile, stripe, t, c0, EVEN, TILE, BLOCK)
        if C1 > 0:
            c1 = C0 + tl.arange(0, C1)
            s = _logits(s, q1, pages, page, number, tile, stripe, t, c1, EVEN, TILE, BLOCK)
        v = tl.load(_at(pages, page, number, tile, stripe[3], D, t, d, TILE, BLOCK))
        acc, m, z = step(acc, m, z, s * scale, v)
        number = ahead
    return acc, m, z


@triton.jit
def _ends(
    acc, m, z, number, other, q0, q1, r0, r1, pages, page, kept, rest, first, last, in_sink, middle,
    length, sink, window_from, kept_stripe, rest_stripe, scale,
    C0: tl.constexpr, C1: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Tiles number first .. last - 1 of the ends; the tiles of the middle follow those of the sink.

    number, other: the first tile's pages of the kept group and of the rest
    Up to C0 + C1 channels are of the kept group and up to R0 + R1 of the rest; V is of the kept group if it has any.
    """
    t, d = tl.arange(0, TILE), tl.arange(0, D)
    newest = length - 1
    tile = first + tl.where(first < in_sink, 0, middle)
    for at in range(first, last):
        ahead = tl.minimum(at + 1, last - 1)
        ahead += tl.where(ahead < in_sink, 0, middle)
        number_ahead = _look_up(kept, ahead, newest, t, TILE, KEPT_BLOCK)
        other_ahead = _look_up(rest, ahead, newest, t, TILE, REST_BLOCK)
        token = tile * TILE + t
        seen = token < length
        whole = seen & ((token < sink) | (token >= window_from))
        s = tl.zeros([q0.shape[0], TILE], tl.float32)
        if R0 > 0:
            s = _logits(s, r0, pages, page, other, tile, rest_stripe, t, tl.arange(0, R0), EVEN, TILE, REST_BLOCK)
        if R1 > 0:
            s = _logits(s, r1, pages, page, other, tile, rest_stripe, t, R0 + tl.arange(0, R1), EVEN, TILE, REST_BLOCK)
        if C0 > 0:
            s = tl.where(whole[None, :], s, 0.0)  # what the rest does not hold of a token of the middle may be anything
            s = _logits(s, q0, pages, page, number, tile, kept_stripe, t, tl.arange(0, C0), EVEN, TILE, KEPT_BLOCK)
            if C1 > 0:
                c1 = C0 + tl.arange(0, C1)
                s = _logits(s, q1, pages, page, number, tile, kept_stripe, t, c1, EVEN, TILE, KEPT_BLOCK)
            v_at = _at(pages, page, number, tile, kept_stripe[3], D, t, d, TILE, KEPT_BLOCK)
        else:
            seen = whole
            v_at = _at(pages, page, other, tile, rest_stripe[3], D, t, d, TILE, REST_BLOCK)
        v = tl.load(v_at, mask=seen[:, None], other=0.0)
        acc, m, z = step(acc, m, z, tl.where(seen[None, :], s * scale, float("-inf")), v)
        tile, number, other = ahead, number_ahead, other_ahead
    return acc, m, z


@triton.jit
def _read(acc, m, z, query, where, row, tiles_read, scale, C: tl.constexpr, F: tl.constexpr):
    """The tiles of a head that `tiles_read` names; the other tuples are those of `read_columns`.

    The head keeps more than C - 32 and up to C channels; 0 = none. EVEN: every count of channels is a multiple of 32.
    """
    q_row, ok, kept_channels, rest_channels = query
    pages, page, kept, rest, kept_stripe, rest_stripe, _bands, _page_bytes = where
    length, sink_size, window = row
    first, last, middle_first, middle_last = tiles_read
    D: tl.constexpr = F.D
    EVEN: tl.constexpr = F.EVEN
    TILE: tl.constexpr = F.TILE
    KEPT_BLOCK: tl.constexpr = F.KEPT_BLOCK
    REST_BLOCK: tl.constexpr = F.REST_BLOCK
    R: tl.constexpr = D if C == 0 else D - C if EVEN else D - C + 32
    C0: tl.constexpr = 64 if C == 96 else C
    R0: tl.constexpr = 64 if R == 96 else R
    t = tl.arange(0, TILE)
    newest = length - 1
    tiles, in_sink, middle = tiles_of(length, sink_size, window, TILE)
    last = tl.minimum(last, tiles - middle)
    # the first pages are looked up before the queries are waited for
    tile = tl.where(first < last, first + tl.where(first < in_sink, 0, middle), 0)
    number = _look_up(kept, tile, newest, t, TILE, KEPT_BLOCK)
    other = _look_up(rest, tile, newest, t, TILE, REST_BLOCK)
    of_middle = number
    q0, q1 = ok, ok  # not used where the head keeps no such channel
    if C > 0:
        of_middle = _look_up(kept, tl.where(middle_first < middle_last, middle_first, 0), newest, t, TILE, KEPT_BLOCK)
        q0 = _query(q_row, ok, kept_channels, tl.arange(0, C0), kept_stripe)
    if C > C0:
        q1 = _query(q_row, ok, kept_channels, C0 + tl.arange(0, C - C0), kept_stripe)
    if first < last:
        r0, r1 = ok, ok
        if R > 0:
            r0 = _query(q_row, ok, rest_channels, tl.arange(0, R0), rest_stripe)
        if R > R0:
            r1 = _query(q_row, ok, rest_channels, R0 + tl.arange(0, R - R0), rest_stripe)
        sink = tl.minimum(sink_size, length)
        acc, m, z = _ends(
            acc, m, z, number, other, q0, q1, r0, r1, pages, page, kept, rest, first, last, in_sink, middle,
            length, sink, window_from(length - 1, sink, window, 1), kept_stripe, rest_stripe, scale,
            C0, C - C0, R0, R - R0, EVEN, TILE, D, KEPT_BLOCK, REST_BLOCK)
    if C > 0:  # noqa: SIM102, known when it is compiled
        if middle_first < middle_last:
            acc, m, z = _middle(acc, m, z, of_middle, q0, q1, pages, page, kept, middle_first, middle_last, newest,
                                kept_stripe, scale, C0, C - C0, EVEN, TILE, D, KEPT_BLOCK)
    return acc, m, z


@triton.jit
def _length(n, cost, START: tl.constexpr):
    """Length on the line of n tiles, of which the first is START longer."""
    return tl.where(n > 0, START + n * cost, 0)


@triton.jit
def _before(x, begin, n, cost, START: tl.constexpr):
    """How many of n tiles, of which the first begins at `begin`, begin before x."""
    with_first = tl.maximum(tl.cdiv(x - begin - START, tl.maximum(cost, 1)), 1)
    return tl.where(x <= begin, 0, tl.minimum(n, with_first))


@triton.jit
def _span(
    lengths, costs, sink_size, window, batch, programs, p, F: tl.constexpr,
):
    """The length of a span, the (row, head) in which program p's span begins, and where that (row, head) begins."""
    H: tl.constexpr = F.H
    TILE: tl.constexpr = F.TILE
    START: tl.constexpr = F.START
    rows, heads = tl.arange(0, F.BATCH), tl.arange(0, F.HEADS)
    middle_cost = tl.load(costs + heads * 2, mask=heads < H, other=0)
    end_cost = tl.load(costs + heads * 2 + 1, mask=heads < H, other=0)

    tiles, _, middle = tiles_of(tl.load(lengths + rows, mask=rows < batch, other=0), sink_size, window, TILE)
    # an absent row has one tile, which is empty
    of_middle = START * tl.sum((middle_cost > 0).to(tl.int32), 0) + middle * tl.sum(middle_cost, 0)
    of_row = START * H + tl.maximum(tiles - middle, 1) * tl.sum(end_cost, 0) + tl.where(middle > 0, of_middle, 0)
    of_row = tl.where(rows < batch, of_row, 0)
    # no tile is longer than a span, so every program between two that read of a (row, head) reads of it, too
    longest = tl.max(tl.maximum(end_cost, middle_cost), 0) + START
    span = tl.maximum(tl.cdiv(tl.sum(of_row, 0), programs), longest)
    row = tl.sum((tl.cumsum(of_row, 0) <= p * span).to(tl.int32), 0)
    begin = tl.sum(tl.where(rows < row, of_row, 0), 0)

    length = tl.load(lengths + row, mask=row < batch, other=0)
    row_tiles, _sink, row_middle = tiles_of(length, sink_size, window, TILE)
    of_head = (_length(tl.maximum(row_tiles - row_middle, 1), end_cost, START)
               + tl.where(middle_cost > 0, _length(row_middle, middle_cost, START), 0))
    of_head = tl.where(heads < H, of_head, 0)
    head = tl.sum(((heads < H) & (tl.cumsum(of_head, 0) <= p * span - begin)).to(tl.int32), 0)
    return span, row, head, begin + tl.sum(tl.where(heads < head, of_head, 0), 0)


@triton.jit
def read_columns(query, where, row, tiles_read, scale, F: tl.constexpr, CODES: tl.constexpr):
    """Numerator [M, D], maximum [M] and denominator [M] of the softmax over tiles of a head.

    query: where the head's queries begin, which of M there are, and the channels of the two groups
    where: the pages, a page's elements, block tables and stripes of the two groups, and what `coded.read` takes besides
    row: its length, and the sizes of sink and window
    tiles_read: [first, last) of the ends, [middle_first, middle_last) of the middle
    """
    M: tl.constexpr = F.M
    D: tl.constexpr = F.D
    TILE: tl.constexpr = F.TILE
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    width = where[4][1]
    if width == 0:
        acc, m, z = _read(acc, m, z, query, where, row, tiles_read, scale, 0, F)
    elif width <= 32:
        acc, m, z = _read(acc, m, z, query, where, row, tiles_read, scale, 32, F)
    elif width <= 64:
        acc, m, z = _read(acc, m, z, query, where, row, tiles_read, scale, 64, F)
    elif D > 64:
        if width <= 96:
            acc, m, z = _read(acc, m, z, query, where, row, tiles_read, scale, 96, F)
        else:
            acc, m, z = _read(acc, m, z, query, where, row, tiles_read, scale, 128, F)
    return acc, m, tl.sum(z, 1)


@triton.jit
def _finish(
    out, acc, m, z, ok, p, place, first, last, part, stat, done, F: tl.constexpr,
):
    """Put a result that programs first .. last have computed into out [places, GROUP, D], if p is the last to come."""
    D: tl.constexpr = F.D
    GROUP: tl.constexpr = F.GROUP
    ROWS: tl.constexpr = F.ROWS
    r, d, few = tl.arange(0, F.M), tl.arange(0, D), tl.arange(0, ROWS)
    to = out + place.to(tl.int64) * (GROUP * D)
    if first == last:
        result = acc / tl.where(z == 0.0, 1.0, z)[:, None]
        tl.store(to + r[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=ok[:, None])
    else:
        at = (p + place) * ROWS + r  # with each partial result, the program or the place is the next one
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=ok[:, None])
        tl.store(stat + 2 * at, m, mask=ok)
        tl.store(stat + 2 * at + 1, z, mask=ok)
        tl.debug_barrier()  # all of it is written before the ticket says so
        if tl.atomic_add(done + place, 1, sem="acq_rel") == last - first:
            merged, _, _ = merge(part, stat, first + place, last - first + 1, ROWS, F.MERGE_LINES, D)
            tl.store(to + few[:, None] * D + d[None, :], merged.to(out.dtype.element_ty), mask=(few < GROUP)[:, None])
            tl.store(done + place, 0)


@triton.jit(do_not_specialize=["batch", "programs", "sink_size", "window"])
def decode(
    pages, page, q, q_b, q_h, out, lengths, kept, rest, bands, page_bytes, costs, part, stat, done, scale, batch,
    programs, sink_size, window, F: tl.constexpr, READ: tl.constexpr, CODES: tl.constexpr,
):
    """Program p: its span of the line of all tiles.

    q: [batch, H * GROUP, D], by strides. out: [batch, H * GROUP, D].
    lengths: int32 [batch], tokens of a row, the query's own included; 0 = no row.
    part, stat: [programs + batch * H, ROWS, D] and [.., ROWS, 2] fp32. done: [batch * H] int32, zeros before and after.
    page: elements of a page. kept, rest: a `Group` each.
    bands: of codes, int32 [H, OF_BANDS], see `kernels.coded`; page_bytes: of codes, bytes of 64 tokens; else not read.
    costs: int32 [H, 2], length on the line of a tile of the middle, 0 = the head has none, and of one of the ends.
    F: a `Form`. READ: `read_columns`, or for codes `coded.read`; CODES: what the latter is compiled for, else None.
    """
    H: tl.constexpr = F.H
    GROUP: tl.constexpr = F.GROUP
    START: tl.constexpr = F.START
    p = tl.program_id(0)
    page = tl.multiple_of(page.to(tl.int64), STRIPE)
    r = tl.arange(0, F.M)
    ok = r < GROUP
    span, row, head, begin = _span(lengths, costs, sink_size, window, batch, programs, p, F)
    at, stop = p * span, (p + 1) * span
    while (row < batch) & (begin < stop):
        length = tl.load(lengths + row)
        kept_stripe, rest_stripe = stripe_of(kept.stripes, head), stripe_of(rest.stripes, head)
        tiles, in_sink, middle = tiles_of(length, sink_size, window, F.TILE)
        middle_cost, end_cost = tl.load(costs + head * 2), tl.load(costs + head * 2 + 1)
        ends, some = tl.maximum(tiles - middle, 1), tl.where(middle_cost > 0, middle, 0)
        middle_begin = begin + _length(ends, end_cost, START)
        newest = tl.where(some > 0, middle_begin + _length(some - 1, middle_cost, START),
                          begin + _length(ends - 1, end_cost, START))  # where the last tile begins
        first, last = begin // span, newest // span
        if (first <= p) & (p <= last):
            b = row.to(tl.int64)
            query = (q + b * q_b + (head * GROUP + r) * q_h, ok,
                     kept.channels + head * kept.width, rest.channels + head * rest.width)
            where = (pages, page, kept.tables + b * kept.tables_b, rest.tables + b * rest.tables_b,
                     kept_stripe, rest_stripe, bands + head * OF_BANDS, page_bytes)
            tiles_read = (_before(at, begin, ends, end_cost, START), _before(stop, begin, ends, end_cost, START),
                          in_sink + _before(at, middle_begin, some, middle_cost, START),
                          in_sink + _before(stop, middle_begin, some, middle_cost, START))
            acc, m, z = READ(query, where, (length, sink_size, window), tiles_read, scale, F, CODES)
            _finish(out, acc, m, z, ok, p, row * H + head, first, last, part, stat, done, F)
        begin = middle_begin + _length(some, middle_cost, START)
        head += 1
        row = tl.where(head == H, row + 1, row)
        head = tl.where(head == H, 0, head)


@triton.jit
def _store(pages, source, slot, channels, start, width, count, page, BLOCK: tl.constexpr, D: tl.constexpr):
    """One token's stripe: the channels picked from source [D], then zeros."""
    c = tl.arange(0, D)
    index = tl.load(channels + c, mask=c < count, other=0)
    value = tl.load(source + index, mask=c < count, other=0.0)
    line = pages + (slot // BLOCK) * page + BLOCK * start + (slot % BLOCK) * width
    tl.store(line + c, value.to(pages.dtype.element_ty), mask=c < width)


@triton.jit
def write(
    pages, k, v, kept_slots, rest_slots, kept_stripes, kept_channels, rest_stripes, rest_channels, every_channel,
    page, k_t, k_h, v_t, v_h, kept_w, rest_w,
    D: tl.constexpr, KEPT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):
    """Program (t, h): put head h of token t of k and v [n, H, D], by strides, where both groups hold it.

    kept_slots, rest_slots: int64 [n]; a slot of the null block or below stores nothing.
    every_channel: int32 [D], 0 .. D - 1, the channels of a V stripe.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = page.to(tl.int64)
    k += t * k_t + head * k_h
    v += t * v_t + head * v_h
    slot = tl.load(kept_slots + t)
    if slot >= KEPT_BLOCK:
        start, width, count, v_start = stripe_of(kept_stripes, head)
        v_width = tl.load(kept_stripes + head * 5 + 4)
        _store(pages, k, slot, kept_channels + head * kept_w, start, width, count, page, KEPT_BLOCK, D)
        _store(pages, v, slot, every_channel, v_start, v_width, v_width, page, KEPT_BLOCK, D)
    slot = tl.load(rest_slots + t)
    if slot >= REST_BLOCK:
        start, width, count, v_start = stripe_of(rest_stripes, head)
        v_width = tl.load(rest_stripes + head * 5 + 4)
        _store(pages, k, slot, rest_channels + head * rest_w, start, width, count, page, REST_BLOCK, D)
        _store(pages, v, slot, every_channel, v_start, v_width, v_width, page, REST_BLOCK, D)
