"""The schedule of `codes.cu` over a server's pages, made on the device: once a step, for all layers.

Its columns are those of eval.cache.attention.schedule. A (row, head) has two parts, whose tiles follow each other on a
line, row by row and head by head: sink and window (SINK), in tiles of 16 tokens for each warp, and the whole pages
between them (PROMPT), in tiles of a page for each warp, or half as many pages where programs would have no tile. Each
part costs `start` before its first tile. Programs have equal spans of the line, and read the tiles that begin in them.

    line p                            the first split of program p; an empty one if no tile begins in its span
    line programs + p + 2 place + j   its other splits: part j of the (row, head) number `place`

Of two splits on the line, either the program or the part is another, so no two share a line. Partial results are
numbered alike: by the place, the first program that reads it, and the programs that have read it before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank import precision
from leank.eval.cache.attention import codes
from leank.eval.cache.attention.kernels.columns import (
    FIELDS,
    FIRST,
    FIRST_NUMBER,
    FRESH,
    LAST,
    NEXT,
    NUMBER,
    PARTIALS,
    ROW,
)
from leank.eval.serving.kernels.paged import window_from

PAGE = tl.constexpr(precision.PAGE)  # tokens of a page of codes
ENDS = tl.constexpr(codes.ENDS)  # tokens of sink and window that a warp reads at a time
COLUMNS = tl.constexpr(triton.next_power_of_2(FIELDS.value))

# fmt: off


@triton.jit
def parts_of(length, sink_size, window):
    """Tokens of a row in sink and window, and whole pages between them."""
    sink = tl.minimum(sink_size, length)
    start = window_from(length - 1, sink, window, PAGE)
    return sink + length - start, (start - sink) // PAGE


@triton.jit
def _before(x, begin, n, cost):
    """How many of n tiles, of which the first begins at `begin`, begin before x."""
    return tl.where(x <= begin, 0, tl.minimum(n, tl.cdiv(x - begin, tl.maximum(cost, 1))))


@triton.jit
def _readers(begin, n, cost, span):
    """How many programs read n tiles, and the program that reads the last one."""
    last = (begin + (n - 1) * cost) // span
    return tl.where(cost >= span, n, last - begin // span + 1), last


@triton.jit
def _rank(p, first_tile, begin, cost, span):
    """How many programs read tiles of a part before program p, whose first one is `first_tile`."""
    return tl.where(cost >= span, first_tile, p - begin // span)


@triton.jit
def _put(table, line, template, row, first, last, fresh, partials, number, first_number, following):
    """Write a split; its other columns are those of the template."""
    column = tl.arange(0, COLUMNS)
    there = column < FIELDS
    x = tl.load(template + column, mask=there, other=0)
    x = tl.where(column == ROW, row, x)
    x = tl.where(column == FIRST, first, x)
    x = tl.where(column == LAST, last, x)
    x = tl.where(column == FRESH, fresh, x)
    x = tl.where(column == PARTIALS, partials, x)
    x = tl.where(column == NUMBER, number, x)
    x = tl.where(column == FIRST_NUMBER, first_number, x)
    x = tl.where(column == NEXT, following, x)
    tl.store(table + line * FIELDS + column, x, mask=there)


@triton.jit(do_not_specialize=["batch", "programs", "most", "sink_size", "window"])
def make(
    table, lengths, templates, costs, batch, programs, most, sink_size, window,
    H: tl.constexpr, HEADS: tl.constexpr, BATCH: tl.constexpr, WARPS: tl.constexpr, FEW: tl.constexpr,
    START: tl.constexpr, FEW_START: tl.constexpr,
):
    """Program (p, l): the splits of program p of layer l.

    table: int64 [layers, most, FIELDS]. lengths: int32 [batch], tokens of each row, 0 = no row.
    templates: int64 [layers, H, 2, FIELDS], lines of sink and window, and of pages.
    costs: int32 [layers, H, 2], of a page, 0 = the head has none, and of a tile of sink and window.
    HEADS, BATCH: powers of two, at least H and the batch. WARPS: of a program of `codes.cu`.
    FEW: pages for each program below which a part costs FEW_START, else START.
    """
    p, layer = tl.program_id(0), tl.program_id(1)
    table += layer.to(tl.int64) * most * FIELDS
    templates += layer * (H * 2 * FIELDS)
    costs += layer * (H * 2)
    rows, heads = tl.arange(0, BATCH), tl.arange(0, HEADS)
    page_cost = tl.load(costs + heads * 2, mask=heads < H, other=0)
    end_cost = tl.load(costs + heads * 2 + 1, mask=heads < H, other=0)
    tokens, pages = parts_of(tl.load(lengths + rows, mask=rows < batch, other=0), sink_size, window)
    some = tl.sum((page_cost > 0).to(tl.int32), 0)
    each = tl.where(some * tl.sum(tl.cdiv(pages, WARPS), 0) >= programs, WARPS, WARPS // 2)
    start = tl.where(some * tl.sum(pages, 0) < FEW * programs, FEW_START, START)
    tiles = tl.cdiv(pages, each)
    of_ends = tl.maximum(tl.cdiv(tokens, WARPS * ENDS), 1)  # an absent row has one tile, which is empty
    of_row = H * start + of_ends * tl.sum(end_cost, 0)
    of_row += tl.where(pages > 0, some * start + tiles * each * tl.sum(page_cost, 0), 0)
    of_row = tl.where(rows < batch, of_row, 0)
    span = tl.maximum(tl.cdiv(tl.sum(of_row, 0), programs), 1)

    at, stop = p * span, (p + 1) * span
    row = tl.sum((tl.cumsum(of_row, 0) <= at).to(tl.int32), 0)
    begin = tl.sum(tl.where(rows < row, of_row, 0), 0)
    tokens, pages = parts_of(tl.load(lengths + row, mask=row < batch, other=0), sink_size, window)
    of_head = start + tl.maximum(tl.cdiv(tokens, WARPS * ENDS), 1) * end_cost
    of_head += tl.where((pages > 0) & (page_cost > 0), start + tl.cdiv(pages, each) * each * page_cost, 0)
    of_head = tl.where(heads < H, of_head, 0)
    head = tl.sum(((heads < H) & (tl.cumsum(of_head, 0) <= at - begin)).to(tl.int32), 0)
    begin += tl.sum(tl.where(heads < head, of_head, 0), 0)

    found = 0
    while (row < batch) & (begin < stop):
        tokens, pages = parts_of(tl.load(lengths + row), sink_size, window)
        cost, of_page = tl.load(costs + head * 2 + 1), tl.load(costs + head * 2)
        n, tile = tl.maximum(tl.cdiv(tokens, WARPS * ENDS), 1), each * of_page
        m = tl.where(of_page > 0, tl.cdiv(pages, each), 0)
        ends_begin = begin + start
        pages_begin = ends_begin + n * cost + start
        begin = tl.where(m > 0, pages_begin + m * tile, ends_begin + n * cost)
        first, last = _before(at, ends_begin, n, cost), _before(stop, ends_begin, n, cost)
        first_page, last_page = _before(at, pages_begin, m, tile), _before(stop, pages_begin, m, tile)
        if (first < last) | (first_page < last_page):
            readers, newest = _readers(ends_begin, n, cost, span)
            of_pages, _ = _readers(pages_begin, m, tile, span)
            shared = ((m > 0) & (newest == pages_begin // span)).to(tl.int32)
            partials = readers + tl.where(m > 0, of_pages, 0) - shared
            rank = tl.where(first < last, _rank(p, first, ends_begin, cost, span),
                            readers - shared + _rank(p, first_page, pages_begin, tile, span))
            place = row * H + head
            first_number = ends_begin // span + place
            line = programs + p + 2 * place
            following = tl.where((place + 1 < batch * H) & (begin + start < stop), line + 2, -1)
            template = templates + head * (2 * FIELDS)
            more = first_page < last_page
            if first < last:
                _put(table, tl.where(found == 0, p, line), template, row, first * (WARPS * ENDS),
                     tl.minimum(last * (WARPS * ENDS), tokens), 1, tl.where(more, 0, partials), first_number + rank,
                     first_number, tl.where(more, line + 1, following))
            if more:
                _put(table, tl.where((found == 0) & (first == last), p, line + 1), template + FIELDS, row,
                     first_page * each * PAGE, tl.minimum(last_page * each, pages) * PAGE,
                     (first == last).to(tl.int32), partials, first_number + rank, first_number, following)
            found = 1
        head += 1
        row = tl.where(head == H, row + 1, row)
        head = tl.where(head == H, 0, head)
    if found == 0:
        _put(table, p, templates, 0, 0, 0, 0, 0, 0, 0, -1)
