"""Pages of codes of a served cache: packing them, reading them in a decoding step, and unpacking them for a chunk.

The bytes are those of `eval.cache.attention.kernels.banded`, which packs a page (`put_group`) and multiplies its codes
(`_sums`). What is here finds the tokens and the pages by block tables. The page layout is that of `eval.serving.coded`.

Names as in eval.serving.kernels.paged. bands: int32 [H, OF_BANDS], what a head stores (`quantised.Head`), the variant
that reads it, and 1 if it keeps a channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank import precision
from leank.eval.cache.attention.kernels.banded import (
    BANDS,
    OF_HEAD,
    WIDTHS,
    Blocks,
    _room,
    _sums,
    bands_of,
    first_plane,
    line_of,
    of_channel,
    put_group,
    room_of,
    unit_of_variant,
    width_of,
    zero_unit,
)
from leank.eval.cache.attention.kernels.packed import HALF, ROOM, _together, word_scale_and_zero
from leank.eval.serving.kernels.paged import OF_BANDS, _ends, _look_up, stripe_of, tiles_of, window_from
from leank.precision import GROUP

VARIANT, KEEPS = OF_HEAD, tl.constexpr(OF_HEAD.value + 1)  # the last two of OF_BANDS
PAGE = tl.constexpr(precision.PAGE)  # tokens of a page
CELL = tl.constexpr(GROUP)  # numbers that share a scale

# fmt: off


@triton.jit
def write(pages, k, v, slots, stripes, page, k_t, k_h, v_t, v_h, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, h): put head h of token t of k and v [n, H, D], by strides, where the group `rest` holds it.

    slots: int64 [n]; a slot of the null block or below stores nothing.
    """
    t, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    slot = tl.load(slots + t)
    if slot >= BLOCK:
        start, width, _, v_start = stripe_of(stripes, head)
        to = pages + (slot // BLOCK) * page.to(tl.int64) + (slot % BLOCK) * width + d
        tl.store(to + BLOCK * start, tl.load(k + t * k_t + head * k_h + d))
        tl.store(to + BLOCK * v_start, tl.load(v + t * v_t + head * v_h + d))


@triton.jit
def _line(pages, page, table, position, real, start, width, BLOCK: tl.constexpr):
    """Pointers [T] to the first column of a stripe of `rest`, for tokens at these positions of one request."""
    number = tl.load(table + position // BLOCK, mask=real, other=0).to(tl.int64)
    return pages + number * page + BLOCK * start + position % BLOCK * width


@triton.jit
def _codes_at(codes, page, page_bytes, table, number, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """The address of a request's page number `number` of 64 tokens; page: numbers of the model's dtype in a block."""
    EACH: tl.constexpr = BLOCK // PAGE
    block = tl.load(table + number // EACH).to(tl.int64)
    return tl.multiple_of(codes + block * (page * NUMBER) + number % EACH * page_bytes, 16)


@triton.jit(do_not_specialize=["kept_b", "rest_b", "chunks", "request", "row", "rows", "most", "programs", "sink_size"])
def pack(
    pages, codes, k, v, ring_k, ring_v, plan, lengths, kept_table, rest_table, stripes, index, bands, rest_stripes,
    page, page_bytes, k_t, k_h, v_t, v_h, kept_b, rest_b, chunks, request, row, rows, most, programs, sink_size,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, PACKED: tl.constexpr,
):
    """Program p packs every `programs`-th of the pages that a step fills, [rows, most, H] of them at most.

    codes: the address of `pages` as a pointer to bytes. k, v: [tokens, H, D] of the step, by strides.
    ring_k, ring_v: [programs, 64, D], a page's tokens in their order.
    chunks: > 0: row b is request `request` + b, whose tokens begin at `row` + plan[0, b], its positions at plan[3, b];
        plan: int32 [4, chunks], `Batch.plan`. 0: row b has one new position, lengths[b] - 1, or none, which is row b.
    PACKED: whether scales are.
    """
    p, d, t = tl.program_id(0), tl.arange(0, D), tl.arange(0, PAGE)
    page = page.to(tl.int64)
    ring_k += p * (PAGE * D)
    ring_v += p * (PAGE * D)
    NUMBER: tl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
    for item in range(p, rows * most * H, programs):
        b, head = item // (most * H), item % H
        if chunks > 0:
            at = tl.load(plan + b)
            first = tl.load(plan + 3 * chunks + b)
            end = first + tl.load(plan + b + 1) - at
            source = row + at - first
        else:
            end = tl.load(lengths + b)
            first = tl.maximum(end - 1, 0)
            source = b - first
        number = first // PAGE + item // H % most
        filled = (number * PAGE + PAGE <= end) & (number * PAGE >= sink_size)
        if filled & (tl.load(bands + head * OF_BANDS + KEEPS) > 0):
            kept_row = kept_table + (request + b).to(tl.int64) * kept_b
            rest_row = rest_table + (request + b).to(tl.int64) * rest_b
            start, _, _, v_start = stripe_of(stripes, head)
            rest_start, width, _, rest_v_start = stripe_of(rest_stripes, head)
            position = number * PAGE + t
            new = (position >= first)[:, None]
            before = position < first
            from_row = (source + position).to(tl.int64)[:, None]
            to = t[:, None] * D + d[None, :]
            line = _line(pages, page, rest_row, position, before, rest_start, width, REST_BLOCK)[:, None] + d[None, :]
            old = tl.load(line, mask=before[:, None], other=0.0)
            fresh = tl.load(k + from_row * k_t + head * k_h + d[None, :], mask=new, other=0.0)
            tl.store(ring_k + to, tl.where(new, fresh, old))
            line = _line(pages, page, rest_row, position, before, rest_v_start, width, REST_BLOCK)[:, None] + d[None, :]
            old = tl.load(line, mask=before[:, None], other=0.0)
            fresh = tl.load(v + from_row * v_t + head * v_h + d[None, :], mask=new, other=0.0)
            tl.store(ring_v + to, tl.where(new, fresh, old))
            tl.debug_barrier()  # all tokens are there before a thread reads those of others
            n, bits = bands_of(bands + head * OF_BANDS)
            to_page = _codes_at(codes, page, page_bytes, kept_row, number, NUMBER, BLOCK)
            put_group(ring_k, ring_v, 64, 0, index + head * D, n, bits, to_page + start, to_page + v_start, 0,
                      D, PAGE, CELL, PACKED)
            tl.debug_barrier()  # and all are read before the next page's come


@triton.jit
def read(query, where, row, tiles_read, scale, F: tl.constexpr, CODES: tl.constexpr):
    """What `paged.read_columns` gives, where the middle is in codes."""
    q_row, ok, index = query[0], query[1], query[2]
    pages, page, kept, rest, kept_stripe, rest_stripe, bands, page_bytes = where
    length, sink_size, window = row
    first, last, middle_first, middle_last = tiles_read
    M: tl.constexpr = F.M
    D: tl.constexpr = F.D
    TILE: tl.constexpr = F.TILE
    dtype: tl.constexpr = pages.dtype.element_ty
    N: tl.constexpr = 8 if F.ROWS <= 8 and M == 16 else M
    acc = tl.zeros([M, D], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M, TILE], tl.float32)
    tiles, in_sink, middle = tiles_of(length, sink_size, window, TILE)
    last = tl.minimum(last, tiles - middle)
    if first < last:
        t, d = tl.arange(0, TILE), tl.arange(0, D)
        tile = first + tl.where(first < in_sink, 0, middle)
        number = _look_up(rest, tile, length - 1, t, TILE, F.REST_BLOCK)
        q = tl.load(q_row[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        sink = tl.minimum(sink_size, length)
        start = window_from(length - 1, sink, window, PAGE)
        # the sink and the window end at tiles, so that every token of these tiles is whole
        acc, m, z = _ends(
            acc, m, z, number, number, q, q, q, q, pages, page, rest, rest, first, last, in_sink, middle,
            length, sink, start, rest_stripe, rest_stripe, scale,
            0, 0, D, 0, True, TILE, D, F.REST_BLOCK, F.REST_BLOCK)
    if middle_first < middle_last:
        NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
        blocks = Blocks(pages, pages.to(tl.pointer_type(tl.uint8), bitcast=True), kept,
                        tl.multiple_of(page * NUMBER, 16), tl.multiple_of(page_bytes, 16))
        n, _ = bands_of(bands)
        variant = tl.load(bands + VARIANT)
        for i in tl.static_range(len(CODES.VARIANTS)):
            if variant == i:
                a0, a1, a2, a3, top, sums = _sums(
                    q_row, ok, index, blocks, kept_stripe[0], kept_stripe[3], middle_first * TILE, middle_last * TILE,
                    n, scale, i, N, F, CODES)
                acc, m, z = _together(acc, m, z, a0, a1, a2, a3, top, sums, TILE,
                                      unit_of_variant(dtype, CODES.PTX, room_of(CODES, i, BANDS)))
    return acc, m, tl.sum(z, 1)


@triton.jit
def _restored(code, scales, cell, mask, BITS: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Numbers of codes of BITS, whose scales and zero points are those of the cells; scales: bytes."""
    if PACKED:
        words = scales.to(tl.pointer_type(tl.int16), bitcast=True)
        scale, zero = word_scale_and_zero(tl.load(words + cell, mask=mask, other=0), zero_unit(BITS))
    else:
        numbers = scales.to(tl.pointer_type(dtype), bitcast=True)
        at = cell // 2 * 4 + cell % 2
        scale = tl.load(numbers + at, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(numbers + at + 2, mask=mask, other=0.0).to(tl.float32)
    return (code.to(tl.float32) * scale + zero).to(dtype)


@triton.jit
def _put_even(to, index, page, n, half, line, BITS: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Write a band of 8 or 4 bits, as `_put_keys`; returns where the next band, and its channels, begin."""
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    room = _room(n)
    scales = page + room * (PAGE * BITS // 8)
    for start in range(0, room, ROOM):
        c = start + tl.arange(0, ROOM)[None, :]
        mask = c < n
        code = tl.load(page + (line + (half * HALF if BITS == 8 else 0)) * room + c, mask=mask, other=0).to(tl.int32)
        if BITS == 4:
            code = code >> 4 * half & 15
        x = _restored(code, scales, c, mask, BITS, dtype, PACKED)
        tl.store(to[:, None] + tl.load(index + c, mask=mask, other=0), x, mask=mask)
    return page + room * of_channel(BITS, NUMBER, CELL, PACKED), index + n


@triton.jit
def _put_keys(to, index, page, n, dtype: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr):
    """Write the keys of a page to the rows `to` [64], zeros in channels that are not stored; index: all D channels."""
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    t = tl.arange(0, PAGE)[:, None]
    half = t // HALF
    line = line_of(t % HALF)
    whole, eight, four, narrow, third = n
    room = _room(whole)
    for start in range(0, room, ROOM):
        c = start + tl.arange(0, ROOM)[None, :]
        mask = c < whole
        numbers = page.to(tl.pointer_type(dtype), bitcast=True)
        x = tl.load(numbers + (half * HALF + line) * room + c, mask=mask, other=0.0)
        tl.store(to[:, None] + tl.load(index + c, mask=mask, other=0), x, mask=mask)
    page += room * of_channel(16, NUMBER)
    index += whole
    page, index = _put_even(to, index, page, eight, half, line, 8, dtype, PACKED)
    page, index = _put_even(to, index, page, four, half, line, 4, dtype, PACKED)
    lines, of_third = _room(narrow) // 4, _room(third) // 4
    upper = page + HALF * 2 * lines
    scales = upper + HALF * of_third
    for start in range(0, 4 * lines, ROOM):
        c = start + tl.arange(0, ROOM)[None, :]
        mask = c < narrow
        row, place = c // 4, c % 4  # places 0 and 1 share a byte, 2 and 3 the next one
        code = tl.load(page + line * (2 * lines) + place // 2 * lines + row, mask=mask, other=0).to(tl.int32)
        code = code >> 2 * (place % 2) + 4 * half & 3
        top = tl.load(upper + line * of_third + row, mask=mask & (c < third), other=0).to(tl.int32)
        code |= (top >> 2 * (place % 2) + place // 2 + 4 * half & 1) << 2
        cell = (2 * (place % 2) + place // 2) * lines + row
        x = _restored(code, scales, cell, mask & (t >= 0), 2, dtype, PACKED)  # of 3 bits, `zero_unit` is the same
        tl.store(to[:, None] + tl.load(index + c, mask=mask, other=0), x, mask=mask)
    index += narrow
    stored = whole + eight + four + narrow
    for start in range(0, D, ROOM):
        c = start + tl.arange(0, ROOM)[None, :]
        mask = stored + c < D
        at = to[:, None] + tl.load(index + c, mask=mask, other=0)
        tl.store(at, tl.zeros([PAGE, ROOM], dtype), mask=mask & (t >= 0))


@triton.jit
def _values_of(page, V: tl.constexpr, dtype: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr):
    """The values [64, D] of a page of V bits."""
    t, d = tl.arange(0, PAGE)[:, None], tl.arange(0, D)[None, :]
    if V == 16:
        x = tl.load(page.to(tl.pointer_type(dtype), bitcast=True) + d * PAGE + t)
    else:
        BITS: tl.constexpr = first_plane(V)
        LINES: tl.constexpr = D * BITS // 8
        code = tl.load(page + d % LINES * PAGE + t).to(tl.int32) >> d // LINES * BITS & 2**BITS - 1
        if V == 3:
            top = tl.load(page + PAGE * D // 4 + d % (D // 4) * HALF + t % HALF).to(tl.int32)
            code |= (top >> d // (D // 4) + 4 * (t // HALF) & 1) << 2
        x = _restored(code, page + PAGE * D * V // 8, d // CELL * PAGE + t, d >= 0, V, dtype, PACKED)
    return x


@triton.jit
def _put_values(to, page, width, dtype: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr):
    """Write the values of a page to the rows `to` [64]."""
    at = to[:, None] + tl.arange(0, D)[None, :]
    for i in tl.static_range(WIDTHS):
        if width == width_of(i):
            tl.store(at, _values_of(page, width_of(i), dtype, D, PACKED))


@triton.jit(do_not_specialize=["kept_b", "rest_b", "plan_b", "request", "row", "sink_size", "window"])
def gather(
    pages, codes, k, v, full_k, full_v, few_k, few_v, plan, kept_table, rest_table, stripes, index, bands, rest_stripes,
    place, page, page_bytes, k_t, k_h, v_t, v_h, full_t, few_t, kept_b, rest_b, plan_b, request, row, sink_size, window,
    D: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, PACKED: tl.constexpr,
):
    """Program (i, b, h): 64 tokens of what head h of request b of a batch sees, as `gather.gather`; codes unpacked.

    codes: the address of `pages` as a pointer to bytes. index: int32 [H, D], all channels, the stored ones first.
    PACKED: whether scales are. The other parameters are those of `gather.gather`.
    """
    b, head = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    page = page.to(tl.int64)
    dtype: tl.constexpr = pages.dtype.element_ty
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    at = tl.load(plan + b)
    first = tl.load(plan + 3 * plan_b + b)
    sink = tl.minimum(sink_size, first)
    of_window = window_from(first, sink, window, PAGE)
    few = tl.load(bands + head * OF_BANDS + KEEPS) == 0
    gap = tl.where(few, of_window - sink, 0)  # a head without a middle sees the window right behind the sink
    count = first + tl.load(plan + b + 1) - at - gap
    begin = tl.program_id(0) * PAGE
    i = begin + tl.arange(0, PAGE)
    if begin < count:
        kept_row = kept_table + (request + b).to(tl.int64) * kept_b
        rest_row = rest_table + (request + b).to(tl.int64) * rest_b
        of_head = tl.load(place + head) * D
        if few:
            to = (tl.load(plan + 2 * plan_b + b) + i).to(tl.int64) * few_t + of_head
            to_k, to_v = few_k + to, few_v + to
        else:
            to = (tl.load(plan + plan_b + b) + i).to(tl.int64) * full_t + of_head
            to_k, to_v = full_k + to, full_v + to
        start, _, _, v_start = stripe_of(stripes, head)
        rest_start, width, _, rest_v_start = stripe_of(rest_stripes, head)
        if (gap == 0) & (begin >= sink_size) & (begin < of_window):
            from_page = _codes_at(codes, page, page_bytes, kept_row, begin // PAGE, NUMBER, BLOCK)
            n, bits = bands_of(bands + head * OF_BANDS)
            _put_keys(to_k, index + head * D, from_page + start, n, dtype, D, PACKED)
            _put_values(to_v, from_page + v_start, bits, dtype, D, PACKED)
        else:
            position = tl.where(i < sink, i, i + gap)
            past = position < first
            new = ((i < count) & (position >= first))[:, None]
            source = (row + at + position - first).to(tl.int64)[:, None]
            line = _line(pages, page, rest_row, position, past, rest_start, width, REST_BLOCK)[:, None] + d[None, :]
            key = tl.load(line, mask=past[:, None], other=0.0)
            new_key = tl.load(k + source * k_t + head * k_h + d[None, :], mask=new, other=0.0)
            tl.store(to_k[:, None] + d[None, :], tl.where(new, new_key, key), mask=(i < count)[:, None])
            line = _line(pages, page, rest_row, position, past, rest_v_start, width, REST_BLOCK)[:, None] + d[None, :]
            value = tl.load(line, mask=past[:, None], other=0.0)
            new_value = tl.load(v + source * v_t + head * v_h + d[None, :], mask=new, other=0.0)
            tl.store(to_v[:, None] + d[None, :], tl.where(new, new_value, value), mask=(i < count)[:, None])
