"""Pages of codes (eval.cache.storage.quantised): how the decode kernel reads them, and how tokens are packed into them.

Codes become numbers as in `packed`. KIVI's pages have one band, a layout's up to four. Every warp has a page of its
own, reads one band of K after the other, adds their products to the page's logits, and then reads V. So a head takes as
many bytes as its widths say, and its pages are read once. A code of the narrow band is joined of its planes; channels
of 2 bits have no line of the upper one, of which nothing is read.

`read` is compiled for a few variants of heads (`attention.variants`), each a loop of its own without branches, in which
Triton asks for the next pages while it multiplies. A loop takes a band's lines in pieces, whose codes become operands
where they lie. Triton does that for pieces of 32 lines, and for numbers that are made of loads and constants alone;
others it would write to shared memory and read again, which took half of the time.

Names as in eval.cache.attention.kernels.packed. A *line* of codes is a byte for every 64 tokens, or 32 below 8 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from leank import precision
from leank.eval.cache.attention import schedule, variants
from leank.eval.cache.attention.kernels.columns import EIGHT, FOUR, NARROW, THIRD, VARIANT, WHOLE
from leank.eval.cache.attention.kernels.packed import (
    AT_ONCE,
    HALF,
    ROOM,
    _codes,
    _in_order,
    _masked,
    _queries,
    _scale,
    _together,
    _tokens,
    finish,
    numbers,
    packed_scale_and_zero,
    scale_and_zero,
    step_of,
    unit_of,
)
from leank.eval.cache.storage import quantised
from leank.eval.cache.storage.codecs import PLANES
from leank.precision import COUNTED, GROUP, VALUE_BITS

BANDS = tl.constexpr(len(precision.BANDS))
COUNTS = tl.constexpr(len(COUNTED))
OF_HEAD = tl.constexpr(len(schedule.BITS))  # numbers of a `quantised.Head`
LINES = tl.constexpr(variants.LEAST_LINES)  # of a piece
WIDTHS = tl.constexpr(len(VALUE_BITS))
LEAST_SCALE, MOST_SCALE = tl.constexpr(quantised.LEAST_SCALE), tl.constexpr(quantised.MOST_SCALE)  # packed
# Triton refuses functions that it does not compile, unless they are constants
CHANNEL_BYTES, VALUE_BYTES = tl.constexpr(precision.channel_bytes), tl.constexpr(precision.value_bytes)


class Codes(NamedTuple):
    """What `read` is compiled for, beside the decode kernel's `Form`."""

    VARIANTS: tuple[Any, ...]  # of heads, see `attention.variants`
    PAGES: tuple[int, ...]  # bytes of a page of K and V for which each has room
    AHEAD: int  # bytes that a program may ask for before it needs them
    PTX: bool  # whether codes are unpacked in PTX, which Triton's interpreter cannot run
    GROUP: int = GROUP  # numbers that share a scale, 32 or 64
    PACKED: bool = False  # whether scales are
    BLOCK: int = 0  # tokens of a block, where `_sums` looks pages up in a block table; 0 = they follow each other


class Blocks(NamedTuple):
    """In the place of a layer, for `_sums`, pages that a block table finds, each of all heads' 64 tokens."""

    base: Any  # block 0, as a pointer to the model's dtype; codes: to bytes
    codes: Any
    table: Any  # int32, the row's blocks
    block_bytes: Any
    page_bytes: Any  # of 64 tokens over all heads that share a block


# fmt: off


@triton.constexpr_function
def room_of(codes, variant, band):
    """Channels of a band for which a variant has room; behind the last band, the bits of V."""
    return codes.VARIANTS[variant][band]


@triton.constexpr_function
def width_of(number):
    """Bits of V, by their number."""
    return VALUE_BITS[number]


@triton.constexpr_function
def first_plane(bits):
    """Bits of a code's first plane, in a page of V."""
    return PLANES[bits][0]


@triton.constexpr_function
def of_channel(bits, number, group=GROUP, packed=False):
    """Bytes that a channel of K takes of a page."""
    return CHANNEL_BYTES(bits, number, group, packed)


@triton.constexpr_function
def v_page_of(dtype, dim, bits, group, packed=False):
    """Bytes of a page of V."""
    return VALUE_BYTES(bits, dim, dtype.primitive_bitwidth // 8, group, packed)


@triton.constexpr_function
def zero_unit(bits):
    """`quantised.zero_unit` of so many bits."""
    return max(0.25, 2**bits / 32)


@triton.constexpr_function
def pieces_of(room, channels):
    """Pieces of so many channels that make up a room."""
    return -(-room // channels)


@triton.constexpr_function
def stages_of(codes, variant, warps):
    """How many pages a program asks for ahead, and one."""
    return 3 if 2 * warps * codes.PAGES[variant] <= codes.AHEAD else 2


@triton.constexpr_function
def unit_of_variant(dtype, ptx, value_bits):
    """What V is multiplied by when it is added up; see `packed.unit_of`."""
    return 1.0 if value_bits == 16 else unit_of(dtype, ptx)


@triton.constexpr_function
def lowest_of(place):
    """The lowest bit of a code of 3 bits, joined from a place of the lower ones, so that it fits into its byte."""
    return min(2 * place, 4)


@triton.constexpr_function
def joining(dtype, place, bit):
    """PTX as `packed.instructions` for codes of 3 bits: two in a place of four bytes, one in a bit of four others."""
    first = lowest_of(place)
    left = first + 2 - bit
    move = f"shl.b32 t, $3, {left}" if left > 0 else f"shr.b32 t, $3, {-left}"
    return f"""{{ .reg .b32 c, t, a, b, one, less;
        shr.b32 c, $2, {2 * place - first}; and.b32 c, c, {(3 << first) * 0x01010101};
        {move}; and.b32 t, t, {(4 << first) * 0x01010101}; or.b32 c, c, t;
        {finish(dtype, first, 4)} }}"""


@triton.jit
def joined(codes, third, scale, zero, PLACE: tl.constexpr, BIT: tl.constexpr, PTX: tl.constexpr):
    """Numbers of 3 bits as `packed.numbers`; codes: the lower two in place PLACE; third: the third one in bit BIT."""
    dtype: tl.constexpr = scale.dtype
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    if PTX:
        if UNIT != 1.0:
            scale *= tl.full([], UNIT / step_of(dtype, lowest_of(PLACE), 1), tl.float32).to(dtype)
            zero *= tl.full([], UNIT, tl.float32).to(dtype)
        x = tl.inline_asm_elementwise(
            joining(dtype, PLACE, BIT), "=r,=r,r,r,r,r,r,r", [codes, third, scale, zero],
            dtype=scale.dtype, is_pure=True, pack=4)
    else:
        code = ((codes >> (2 * PLACE)) & 3) | (((third >> BIT) & 1) << 2)
        x = ((code.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)) * UNIT).to(dtype)
    return x


@triton.jit
def _room(n):
    """Channels for which a band of n has room."""
    return (n + ROOM - 1) // ROOM * ROOM


@triton.jit
def line_of(t):
    """The lines of tokens t in a half of a page of K; see `storage.quantised.tokens_in_lines`."""
    return t // 4 % 2 * 16 + t % 2 * 8 + t // 8 * 2 + t // 2 % 2


@triton.jit
def _lines():
    """The lines of `packed._tokens`, [HALF]."""
    return line_of(_tokens())


@triton.jit
def _tokens_of_lines():
    """The tokens of the lines of a half of a page of K, [HALF]."""
    line = tl.arange(0, HALF)
    return line % 8 // 2 * 8 + line // 16 * 4 + line % 2 * 2 + line // 8 % 2


@triton.jit
def page_bytes(n, NUMBER: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr = False):
    """Bytes of a page of K, in which a number takes NUMBER bytes.

    n: channels in 16, 8 and 4 bits, narrow ones, and those of them with 3
    """
    even = _room(n[0]) * of_channel(16, NUMBER, G) + _room(n[1]) * of_channel(8, NUMBER, G, PACKED)
    even += _room(n[2]) * of_channel(4, NUMBER, G, PACKED) + _room(n[3]) * of_channel(2, NUMBER, G, PACKED)
    return even + _room(n[4]) * (of_channel(3, NUMBER, G) - of_channel(2, NUMBER, G))


@triton.jit
def _queries_of(q_row, ok, index, n, C: tl.constexpr, F: tl.constexpr):
    """Queries [P, M, LINES] of every piece of a band of n channels, at most C."""
    found = tl.tuple([])
    for j in tl.static_range(pieces_of(C, LINES)):
        found += (_queries(q_row, ok, index, tl.arange(0, LINES) + j * LINES, n, F.WARPS),)
    return found


@triton.jit
def _narrow_queries(q_row, ok, index, n, C: tl.constexpr, F: tl.constexpr):
    """Queries [P, M, LINES] of every piece of a narrow band for its lines' channels 0, then 2, 1 and 3."""
    found = tl.tuple([])
    for j in tl.static_range(pieces_of(C, 4 * LINES)):
        for i in tl.static_range(4):
            channel = 4 * (tl.arange(0, LINES) + j * LINES) + i // 2 + i % 2 * 2
            found += (_queries(q_row, ok, index, channel, n, F.WARPS),)
    return found


@triton.jit
def _scales(first, start, cell, there, dtype: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr):
    """Scales and zero points [P, R] of the cells `cell` [1, R] of pages in so many bits.

    first: address of the first cell's in the first page; start: [P], bytes to the page that each warp reads
    """
    cells = first.to(tl.pointer_type(tl.int32), bitcast=True)
    if PACKED:
        number = (start // 2)[:, None] + cell
        scale, zero = packed_scale_and_zero(cells, number, there, dtype, zero_unit(BITS))
    else:
        NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
        scales = first.to(tl.pointer_type(dtype), bitcast=True)
        scale, zero = scale_and_zero(cells, scales, (start // (2 * NUMBER))[:, None] + cell, there)
    return scale, zero


@triton.jit
def _narrow(
    s, t, q, page, start, left, n, third, dtype: tl.constexpr, C: tl.constexpr, CODES: tl.constexpr,
):
    """Add the products of a narrow band of n channels, at most C, to s and t, logits of a page's halves [P, M, HALF].

    q: queries from `_narrow_queries`
    page: address of the band in the first page; start: [P], bytes to the page that each warp reads
    left: [P], tokens from a page's first to the last one
    third: channels that have a third bit

    All lines of the variant are computed, without a branch: of those that the head lacks, no byte is read.
    """
    PTX: tl.constexpr = CODES.PTX
    CELLS: tl.constexpr = 2 * HALF // CODES.GROUP  # groups of a channel in a page: one, or one for each half
    lines, of_third = _room(n) // 4, _room(third) // 4
    upper = page + HALF * 2 * lines
    scales = upper + HALF * of_third
    token, before = _lines()[None, None, :], (left > 0)[:, None]
    for j in tl.static_range(pieces_of(C, 4 * LINES)):
        row = tl.arange(0, LINES) + j * LINES
        there, held = before & (row < lines)[None, :], before & (row < of_third)[None, :]
        at = start[:, None, None] + row[None, :, None]
        first = tl.load(page + at + token * (2 * lines), mask=there[:, :, None], other=0)
        later = tl.load(page + at + (lines + token * (2 * lines)), mask=there[:, :, None], other=0)
        bits = tl.load(upper + at + token * of_third, mask=held[:, :, None], other=0)
        pairs = tl.tuple([])
        for i in tl.static_range(4):
            for half in tl.static_range(CELLS):
                cell = ((4 * half + i) * lines + row)[None, :]
                pairs += _scales(scales, start, cell, there, dtype, 2, CODES.PACKED)
        for i in tl.static_range(4):
            scale, zero = pairs[2 * CELLS * i][:, :, None], pairs[2 * CELLS * i + 1][:, :, None]
            lower = first if i % 2 == 0 else later
            s = tl.dot(q[4 * j + i], joined(lower, bits, scale, zero, i // 2, i, PTX), s)
            if CELLS == 2:
                scale, zero = pairs[2 * CELLS * i + 2][:, :, None], pairs[2 * CELLS * i + 3][:, :, None]
            t = tl.dot(q[4 * j + i], joined(lower, bits, scale, zero, i // 2 + 2, i + 4, PTX), t)
    return s, t


@triton.jit
def _even(
    s, t, q, page, start, left, room, dtype: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, CODES: tl.constexpr,
):
    """Do what `_narrow` does for a band in 8 or 4 bits with `room` channels, at most C."""
    PTX: tl.constexpr = CODES.PTX
    SIZE: tl.constexpr = 2 * HALF * BITS // 8
    scales = page + room * SIZE
    for j in tl.static_range(pieces_of(C, LINES)):
        row = tl.arange(0, LINES) + j * LINES
        there = (left > 0)[:, None] & (row < room)[None, :]
        at = start[:, None, None] + row[None, :, None] + (_lines() * room)[None, None, :]
        codes = tl.load(page + at, mask=there[:, :, None], other=0)
        later = codes
        if BITS == 8:
            later = tl.load(page + at + HALF * room, mask=there[:, :, None], other=0)
        cell = row[None, :]
        scale, zero = _scales(scales, start, cell, there, dtype, BITS, CODES.PACKED)
        s = tl.dot(q[j], numbers(codes, scale[:, :, None], zero[:, :, None], 0, BITS, PTX), s)
        if CODES.GROUP == HALF:
            scale, zero = _scales(scales, start, cell + room, there, dtype, BITS, CODES.PACKED)
        scale, zero = scale[:, :, None], zero[:, :, None]
        t = tl.dot(q[j], numbers(later, scale, zero, 8 // BITS - 1, BITS, PTX), t)
    return s, t


@triton.jit
def _whole(s, t, q, page, start, left, room, C: tl.constexpr):
    """Do what `_narrow` does for a band in 16 bits. page: address of the band in the first page, of numbers."""
    for j in tl.static_range(pieces_of(C, ROOM)):
        row = tl.arange(0, ROOM) + j * ROOM
        at = start[:, None, None] + (_lines() * room)[None, None, :] + row[None, :, None]
        there = ((left > 0)[:, None] & (row < room)[None, :])[:, :, None]
        first = tl.load(page + at, mask=there, other=0.0)
        later = tl.load(page + at + HALF * room, mask=there, other=0.0)
        s = tl.dot(q[j], first, s)
        t = tl.dot(q[j], later, t)
    return s, t


@triton.jit
def _values(
    page, start, left, top, half: tl.constexpr, SLAB: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, CODES: tl.constexpr,
):
    """Values of a half of pages in slab SLAB, [P, D / 4, HALF]; top: bytes of the highest of 3 bits."""
    W: tl.constexpr = F.D // 4
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    t = tl.arange(0, HALF)
    there = (left > 0)[:, None, None]
    if V == 16:
        numbers_of = page.to(tl.pointer_type(dtype), bitcast=True)
        at = (start // NUMBER + half * HALF)[:, None, None] + ((SLAB * W + tl.arange(0, W)) * F.PAGE)[None, :, None]
        found = tl.load(numbers_of + at + t[None, None, :], mask=there, other=0.0)
    else:
        BITS: tl.constexpr = first_plane(V)
        LINES: tl.constexpr = BITS // 2  # slabs / codes of a byte
        line = SLAB % LINES * W + tl.arange(0, W)
        at = (start + half * HALF)[:, None, None] + (line * F.PAGE)[None, :, None] + t[None, None, :]
        codes = tl.load(page + at, mask=there, other=0)
        PTX: tl.constexpr = CODES.PTX
        scale, zero = _scales_of_values(page, start, left, half, SLAB, dtype, F, V, CODES)
        scale, zero = scale[:, None, :], zero[:, None, :]
        if V == 3:
            found = joined(codes, top, scale, zero, SLAB, half * 4 + SLAB, PTX)
        else:
            found = numbers(codes, scale, zero, SLAB // LINES, BITS, PTX)
    return found


@triton.jit
def _scales_of_values(
    page, start, left, half, SLAB: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    CODES: tl.constexpr,
):
    """Scales and zero points [P, HALF] of a slab's values."""
    cell = tl.arange(0, HALF) + (SLAB * (F.D // 4) // CODES.GROUP * F.PAGE + half * HALF)
    there = (left > 0)[:, None] & (cell >= 0)[None, :]
    return _scales(page + F.PAGE * F.D * V // 8, start, cell[None, :], there, dtype, V, CODES.PACKED)


@triton.jit
def _add(
    a0, a1, a2, a3, p, page, start, left, half: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    CODES: tl.constexpr,
):
    """Add values times weights p [P, N, HALF] to every slab's sum, [P, D / 4, N]."""
    W: tl.constexpr = F.D // 4
    x = _in_order(p.to(dtype))
    top = 0
    if V == 3:
        at = (start + F.PAGE * F.D // 4)[:, None, None] + (tl.arange(0, W) * HALF)[None, :, None]
        top = tl.load(page + at + tl.arange(0, HALF)[None, None, :], mask=(left > 0)[:, None, None], other=0)
    a0 = tl.dot(_values(page, start, left, top, half, 0, dtype, F, V, CODES), x, a0)
    a1 = tl.dot(_values(page, start, left, top, half, 1, dtype, F, V, CODES), x, a1)
    a2 = tl.dot(_values(page, start, left, top, half, 2, dtype, F, V, CODES), x, a2)
    a3 = tl.dot(_values(page, start, left, top, half, 3, dtype, F, V, CODES), x, a3)
    return a0, a1, a2, a3


@triton.jit
def _places(blocks, page, last, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Where the pages number `page` [P] of a row begin, in bytes, int64; those from token `last` on may be anywhere."""
    EACH: tl.constexpr = BLOCK // PAGE
    block = tl.load(blocks.table + page // EACH, mask=page * PAGE < last, other=0).to(tl.int64)
    return block * blocks.block_bytes + page % EACH * blocks.page_bytes


@triton.jit
def _sums(
    q_row, ok, index, layer, k_at, v_at, first, last, n, scale,
    WHICH: tl.constexpr, N: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr,
):
    """Every warp's softmax of tokens [first, last) of a part whose bands have n channels, for `packed._together`.

    layer: of `parts`, or `Blocks`, in whose page the head's K and V begin at k_at and v_at
    """
    D: tl.constexpr = F.D
    PAGE: tl.constexpr = F.PAGE
    WARPS: tl.constexpr = F.WARPS
    K16: tl.constexpr = room_of(CODES, WHICH, 0)
    K8: tl.constexpr = room_of(CODES, WHICH, 1)
    K4: tl.constexpr = room_of(CODES, WHICH, 2)
    K3: tl.constexpr = room_of(CODES, WHICH, 3)
    V: tl.constexpr = room_of(CODES, WHICH, BANDS)
    PTX: tl.constexpr = CODES.PTX
    dtype: tl.constexpr = layer.base.dtype.element_ty
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    V_PAGE: tl.constexpr = v_page_of(dtype, D, V, CODES.GROUP, CODES.PACKED)
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    k, v = tl.multiple_of(layer.codes + k_at, 16), tl.multiple_of(layer.codes + v_at, 16)
    token, number = _tokens(), tl.arange(0, WARPS)
    whole, eight, four = _room(n[0]), _room(n[1]), _room(n[2])
    q16 = tl.tuple([])
    for j in tl.static_range(pieces_of(K16, ROOM)):
        of_piece = _queries(q_row, ok, index, tl.arange(0, ROOM) + j * ROOM, n[0], WARPS)
        if UNIT != 1.0:  # codes are as small
            of_piece *= tl.full([], UNIT, tl.float32).to(dtype)
        q16 += (of_piece,)
    index += n[0]
    q8 = _queries_of(q_row, ok, index, n[1], K8, F)
    index += n[1]
    q4 = _queries_of(q_row, ok, index, n[2], K4, F)
    index += n[2]
    q = _narrow_queries(q_row, ok, index, n[3], K3, F)
    k_page = page_bytes(n, NUMBER, CODES.GROUP, CODES.PACKED)
    scale *= 1.0 / UNIT

    top = tl.full([WARPS, N], float("-inf"), tl.float32)  # m and z of every warp
    sums = tl.zeros([WARPS, N, HALF], tl.float32)
    a0 = tl.zeros([WARPS, D // 4, N], tl.float32)
    a1, a2, a3 = a0, a0, a0
    M: tl.constexpr = ok.shape[0]
    found = number * k_page
    if CODES.BLOCK > 0:
        found = _places(layer, first // PAGE + number, last, CODES.BLOCK, PAGE)
    for at in tl.range(first, last, WARPS * PAGE, num_stages=stages_of(CODES, WHICH, WARPS)):
        left = last - at - number * PAGE
        start = found
        page = k
        if CODES.BLOCK > 0:  # the next pages are looked up before these are waited for
            start = tl.multiple_of(start, [16])
            found = _places(layer, at // PAGE + WARPS + number, last, CODES.BLOCK, PAGE)
        else:
            page += tl.multiple_of(at // PAGE * k_page, 16)
        s = tl.zeros([WARPS, M, HALF], tl.float32)
        t = s
        if K16 > 0:
            of_numbers = page.to(tl.pointer_type(dtype), bitcast=True)
            s, t = _whole(s, t, q16, of_numbers, start // NUMBER, left, whole, K16)
            page += tl.multiple_of(whole * of_channel(16, NUMBER, CODES.GROUP), 16)
        if K8 > 0:
            s, t = _even(s, t, q8, page, start, left, eight, dtype, 8, K8, CODES)
            page += tl.multiple_of(eight * of_channel(8, NUMBER, CODES.GROUP, CODES.PACKED), 16)
        if K4 > 0:
            s, t = _even(s, t, q4, page, start, left, four, dtype, 4, K4, CODES)
            page += tl.multiple_of(four * of_channel(4, NUMBER, CODES.GROUP, CODES.PACKED), 16)
        if K3 > 0:
            s, t = _narrow(s, t, q, page, start, left, n[3], n[4], dtype, K3, CODES)
        s, t = _masked(s, token, left, N), _masked(t, token, left - HALF, N)
        # one step of the online softmax; the scale is positive, so the maximum may come before it
        new = tl.maximum(top, tl.maximum(tl.max(s, 2), tl.max(t, 2)) * scale)
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)
        top = new
        p = tl.exp2(s * scale - safe[:, :, None])
        sums = sums * alpha[:, :, None] + p
        alpha = alpha[:, None, :]
        page = v
        if CODES.BLOCK == 0:
            page += tl.multiple_of(at // PAGE * V_PAGE, 16)
            start = number * V_PAGE
        a0, a1, a2, a3 = a0 * alpha, a1 * alpha, a2 * alpha, a3 * alpha
        a0, a1, a2, a3 = _add(a0, a1, a2, a3, p, page, start, left, 0, dtype, F, V, CODES)
        p = tl.exp2(t * scale - safe[:, :, None])
        sums += p
        a0, a1, a2, a3 = _add(a0, a1, a2, a3, p, page, start, left, 1, dtype, F, V, CODES)
    return a0, a1, a2, a3, top, sums


@triton.jit
def read(
    acc, m, z, q_row, ok, index, layer, entry, k_at, v_at, first, last, scale,
    F: tl.constexpr, CODES: tl.constexpr,
):
    """Tokens [first, last) of a part in pages of codes; the form for 16 bits is `decode.middle`.

    q_row: [M], where the queries of a tile begin; ok: [M], which rows hold one
    index: the numbers of the head's kept channels
    entry: the split's line of the schedule
    k_at, v_at: bytes from the layer's `codes` to where the head's K and V begin
    scale: factor of the logits, positive
    """
    N: tl.constexpr = 8 if F.ROWS <= 8 and acc.shape[0] == 16 else acc.shape[0]
    n = (tl.load(entry + WHOLE).to(tl.int32), tl.load(entry + EIGHT).to(tl.int32), tl.load(entry + FOUR).to(tl.int32),
         tl.load(entry + NARROW).to(tl.int32), tl.load(entry + THIRD).to(tl.int32))
    variant = tl.load(entry + VARIANT).to(tl.int32)
    for i in tl.static_range(len(CODES.VARIANTS)):
        if variant == i:
            a0, a1, a2, a3, top, sums = _sums(q_row, ok, index, layer, k_at, v_at, first, last, n, scale,
                                              i, N, F, CODES)
            acc, m, z = _together(acc, m, z, a0, a1, a2, a3, top, sums, F.TILE,
                                  unit_of_variant(layer.base.dtype.element_ty, CODES.PTX, room_of(CODES, i, BANDS)))
    return acc, m, z


@triton.jit
def _due(ring, slots, oldest, index, channel, n, D: tl.constexpr):
    """The HALF tokens from slot `oldest` on in the order of lines, [HALF, R], for channels [R]; zeros from n on."""
    kept, t = channel < n, _tokens_of_lines()
    at = tl.load(index + channel, mask=kept, other=0)[None, :]
    return tl.load(ring + ((t + oldest) % slots)[:, None] * D + at, mask=kept[None, :], other=0.0)


@triton.jit
def _packed(low, high, top):
    """Scales and zero points of ranges, float32, and their words, int16; see `quantised.quantise_packed`."""
    unit = tl.maximum((top + 1.0) / 32, 0.25)
    fine, reach = unit < 1, 63 * unit
    finite = tl.abs(high - low) < float("inf")
    need = tl.div_rn(high - low, top + tl.where(fine, unit / 2, -unit))
    need = tl.maximum(need, tl.maximum(tl.div_rn(-low, reach), tl.div_rn(high, reach + top)))
    need = tl.where(finite, tl.minimum(tl.maximum(need, LEAST_SCALE), MOST_SCALE), MOST_SCALE)
    # up to four bits of fraction
    scale = ((need.to(tl.int32, bitcast=True) + 0x7FFFF) & ~0x7FFFF).to(tl.float32, bitcast=True)
    steps = tl.where(finite, tl.minimum(tl.maximum(tl.div_rn(low, unit * scale), -63.0), 63.0), 0.0)
    steps = tl.where(fine, (steps + 12582912.0) - 12582912.0, tl.floor(steps))
    word = scale.to(tl.float16).to(tl.int16, bitcast=True) | tl.abs(steps).to(tl.int16)
    word = tl.where(finite, tl.where(steps < 0, word | -32768, word), 0x7E00).to(tl.int16)
    return scale, steps * unit * scale, word


@triton.jit
def _packed_codes(x, scale, zero, top):
    """Codes of numbers x up to top, in int32; scale, zero and top have its shape."""
    code = tl.div_rn(x.to(tl.float32) - zero, scale)
    code = (code + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(code, 0.0), top).to(tl.int32)


@triton.jit
def _coded(
    ring, slots, oldest, index, channel, n, top, D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr,
):
    """Codes up to top [R] of a group's tokens for channels [R]; see `_due`.

    Returns the codes [HALF, R] of its first half, and of its second one, where it has one (else the same), and scales
    and zero points [R], or words twice.
    """
    dtype: tl.constexpr = ring.dtype.element_ty
    x = _due(ring, slots, oldest, index, channel, n, D)
    low, high = tl.min(x.to(tl.float32), 0), tl.max(x.to(tl.float32), 0)
    if G > HALF:
        y = _due(ring, slots, oldest + HALF, index, channel, n, D)
        low, high = tl.minimum(low, tl.min(y.to(tl.float32), 0)), tl.maximum(high, tl.max(y.to(tl.float32), 0))
    if PACKED:
        scale, zero, word = _packed(low, high, top)
        first = _packed_codes(x, scale[None, :], zero[None, :], top[None, :])
        later = _packed_codes(y, scale[None, :], zero[None, :], top[None, :])
        scale = tl.where(channel < n, word, 0).to(tl.int16)  # a band's spare room holds zeros
        low = scale
    else:
        low, high = low.to(dtype), high.to(dtype)
        scale = _scale(low, high, top)
        first = _codes(x, scale[None, :], low[None, :], top[None, :])
        later = first
        if G > HALF:
            later = _codes(y, scale[None, :], low[None, :], top[None, :])
    return first, later, scale, low


@triton.jit
def _put_scales(scales, number, scale, zero, there, PACKED: tl.constexpr):
    """Write scales and zero points, or words, [R] of the cells `number`; scales: bytes."""
    of_cells = scales.to(tl.pointer_type(scale.dtype), bitcast=True)
    if PACKED:
        tl.store(of_cells + number, scale, mask=there)
    else:
        at = number // 2 * 4 + number % 2
        tl.store(of_cells + at, scale, mask=there)
        tl.store(of_cells + at + 2, zero, mask=there)


@triton.jit
def _placed(first, later, half, G: tl.constexpr):
    """Bytes of a group's codes, of which those of a page's second half are the upper four bits."""
    if G > HALF:
        return first | later << 4
    return first << 4 * half


@triton.jit
def _put_bytes(to, code, half, there, G: tl.constexpr):
    """Write bytes [HALF, R] from `_placed`.

    A group of HALF tokens leaves the other half as it is: the first one clears the later one, which comes after it.
    """
    if G == HALF:  # noqa: SIM102  (the other condition is known at run time alone)
        if half > 0:
            tl.debug_barrier()  # what is there has been written
            code |= tl.load(to, mask=there, other=0).to(tl.int32)
    tl.store(to, code.to(tl.uint8), mask=there)


@triton.jit
def _put_even(
    ring, slots, oldest, index, n, page, half, BITS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    G: tl.constexpr, PACKED: tl.constexpr,
):
    """Write a group of tokens into a band of 8 or 4 bits."""
    room = _room(n)
    scales = page + room * (PAGE * BITS // 8)
    t = tl.arange(0, HALF)
    for start in range(0, room, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        there = (row < room)[None, :]
        top = tl.full([AT_ONCE], 2**BITS - 1.0, tl.float32)
        first, later, scale, zero = _coded(ring, slots, oldest, index, row, n, top, D, G, PACKED)
        at = t[:, None] * room + row[None, :]
        if BITS == 8:
            tl.store(page + at + half * HALF * room, first.to(tl.uint8), mask=there)
            if G > HALF:
                tl.store(page + at + HALF * room, later.to(tl.uint8), mask=there)
        else:
            _put_bytes(page + at, _placed(first, later, half, G), half, there, G)
        _put_scales(scales, half * room + row, scale, zero, row < room, PACKED)


@triton.jit
def _put_narrow(
    ring, slots, oldest, index, n, third, page, half, D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr,
):
    """Write a group of tokens into a narrow band; the parameters are those of `_narrow`."""
    lines, of_third = _room(n) // 4, _room(third) // 4
    upper = page + HALF * 2 * lines
    scales = upper + HALF * of_third
    t = tl.arange(0, HALF)[:, None]
    for start in range(0, lines, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        there = row < lines
        bits = tl.zeros([HALF, AT_ONCE], tl.int32)
        for pair in tl.static_range(2):  # channels 0 and 1 of a line, then 2 and 3
            byte = tl.zeros([HALF, AT_ONCE], tl.int32)
            for i in tl.static_range(2):
                channel = tl.where(there, 4 * row + 2 * pair + i, n)
                top = tl.where(channel < third, 7.0, 3.0)
                x, y, scale, zero = _coded(ring, slots, oldest, index, channel, n, top, D, G, PACKED)
                byte |= _placed((x & 3) << 2 * i, (y & 3) << 2 * i, half, G)
                bits |= _placed((x >> 2) << 2 * i + pair, (y >> 2) << 2 * i + pair, half, G)
                _put_scales(scales, (4 * half + 2 * i + pair) * lines + row, scale, zero, there, PACKED)
            _put_bytes(page + t * (2 * lines) + (pair * lines + row)[None, :], byte, half, there[None, :], G)
        _put_bytes(upper + t * of_third + row[None, :], bits, half, (row < of_third)[None, :], G)


@triton.jit
def _put_whole(ring, slots, oldest, index, n, page, half, D: tl.constexpr, G: tl.constexpr):
    """Write a group of tokens into a band of 16 bits."""
    room, t = _room(n), tl.arange(0, HALF)
    for first in range(0, room, AT_ONCE):
        row = first + tl.arange(0, AT_ONCE)
        there = (row < room)[None, :]
        at = t[:, None] * room + row[None, :]
        tl.store(page + at + half * HALF * room, _due(ring, slots, oldest, index, row, n, D), mask=there)
        if G > HALF:
            tl.store(page + at + HALF * room, _due(ring, slots, oldest + HALF, index, row, n, D), mask=there)


@triton.jit
def _quarters(code, D: tl.constexpr):
    """Quarters [HALF, D / 4] of codes [HALF, D]."""
    parts = tl.permute(tl.reshape(code, [HALF, 2, 2, D // 4]), (0, 3, 1, 2))
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _put_values(
    ring, slots, oldest, page, half, V: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write HALF tokens of V into half `half` of a page; returns the highest of 3 bits, four to a number."""
    dtype: tl.constexpr = ring.dtype.element_ty
    t, d = tl.arange(0, HALF), tl.arange(0, D)
    token, top = t + half * HALF, 0
    x = tl.load(ring + ((t + oldest) % slots)[:, None] * D + d[None, :])
    if V == 16:
        tl.store(page.to(tl.pointer_type(dtype), bitcast=True) + d[None, :] * PAGE + token[:, None], x)
    else:
        CELL: tl.constexpr = min(G, D)
        cells = tl.reshape(x.to(tl.float32), [HALF, D // CELL, CELL])
        low, high = tl.min(cells, 2), tl.max(cells, 2)
        if PACKED:
            step, zero, word = _packed(low, high, tl.full([HALF, D // CELL], 2**V - 1.0, tl.float32))
            code = _packed_codes(cells, step[:, :, None], zero[:, :, None], 2**V - 1.0)
            scale, low = word, word
        else:
            low, high = low.to(dtype), high.to(dtype)
            scale = _scale(low, high, 2**V - 1.0)
            code = _codes(cells, scale[:, :, None], low[:, :, None], 2**V - 1.0)
        code = tl.reshape(code, [HALF, D])
        cell = tl.arange(0, D // CELL)[None, :] * PAGE + token[:, None]
        _put_scales(page + PAGE * D * V // 8, cell, scale, low, cell >= 0, PACKED)
        if V == 8:
            tl.store(page + d[None, :] * PAGE + token[:, None], code.to(tl.uint8))
        elif V == 4:
            first, second = tl.split(tl.permute(tl.reshape(code, [HALF, 2, D // 2]), (0, 2, 1)))
            line = tl.arange(0, D // 2)
            tl.store(page + line[None, :] * PAGE + token[:, None], (first | second << 4).to(tl.uint8))
        else:
            a, b, c, e = _quarters(code & 3, D)
            line = tl.arange(0, D // 4)
            tl.store(page + line[None, :] * PAGE + token[:, None], (a | b << 2 | c << 4 | e << 6).to(tl.uint8))
            a, b, c, e = _quarters(code >> 2, D)
            top = a | b << 1 | c << 2 | e << 3
    return top


@triton.jit
def _put_page(
    ring, slots, oldest, page, half, V: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write a group of tokens into a page of V."""
    first = _put_values(ring, slots, oldest, page, half, V, D, PAGE, G, PACKED)
    later = first
    if G > HALF:
        later = _put_values(ring, slots, oldest + HALF, page, half + 1, V, D, PAGE, G, PACKED)
    if V == 3:
        line = tl.arange(0, D // 4)[None, :] * HALF + tl.arange(0, HALF)[:, None]
        _put_bytes(page + PAGE * D // 4 + line, _placed(first, later, half, G), half, line >= 0, G)


@triton.jit
def bands_of(bands):
    """Channels of a head's bands, as `page_bytes` takes them, and the bits of its V, from int32 [OF_HEAD]."""
    n = tl.tuple([])
    for i in tl.static_range(COUNTS):
        n += (tl.load(bands + i),)
    return n, tl.load(bands + COUNTS)


@triton.jit
def v_page_bytes(width, dtype: tl.constexpr, D: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr = False):
    """Bytes of a page of V of so many bits."""
    size = 0
    for i in tl.static_range(WIDTHS):
        size = tl.where(width == width_of(i), v_page_of(dtype, D, width_of(i), G, PACKED), size)
    return size


@triton.jit
def put_group(
    ring_k, ring_v, slots, oldest, index, n, width, page, v_page, half, D: tl.constexpr, PAGE: tl.constexpr,
    G: tl.constexpr, PACKED: tl.constexpr = False,
):
    """Pack the group of G tokens from slot `oldest` on into a head's page of K and page of V.

    n, width: from `bands_of`; half: where a group of HALF tokens goes, 0 or 1, else 0
    """
    dtype: tl.constexpr = ring_k.dtype.element_ty
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    whole, eight, four, narrow, third = n
    _put_whole(ring_k, slots, oldest, index, whole, page.to(tl.pointer_type(dtype), bitcast=True), half, D, G)
    page += _room(whole) * of_channel(16, NUMBER, G)
    index += whole
    _put_even(ring_k, slots, oldest, index, eight, page, half, 8, D, PAGE, G, PACKED)
    page += _room(eight) * of_channel(8, NUMBER, G, PACKED)
    index += eight
    _put_even(ring_k, slots, oldest, index, four, page, half, 4, D, PAGE, G, PACKED)
    page += _room(four) * of_channel(4, NUMBER, G, PACKED)
    _put_narrow(ring_k, slots, oldest, index + four, narrow, third, page, half, D, G, PACKED)
    for i in tl.static_range(WIDTHS):
        if width == width_of(i):
            _put_page(ring_v, slots, oldest, v_page, half, width_of(i), D, PAGE, G, PACKED)


@triton.jit
def move(
    ring_k, ring_v, k, v, index, places, bands, seen_ptr, start_ptr, length_ptr, done,
    index_b, slots, window, flush, H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (b, h): pack the due whole groups of row b's window behind those that head h holds; see `ring.move`.

    The bytes are exactly those that `PageSegment.append` writes.
    k, v: bytes; places count in them
    bands: int32 [B, H, OF_HEAD], what heads store, `quantised.Head`
    G: numbers of a quantisation group
    PACKED: whether scales are
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(start_ptr + b)
    due = tl.maximum(tl.load(seen_ptr + b) - start - window, 0) // flush * flush
    if due > 0:
        head = b * H + h
        if tl.load(places + head * 4 + 2) > 0:
            dtype: tl.constexpr = ring_k.dtype.element_ty
            k += tl.load(places + head * 4)
            v += tl.load(places + head * 4 + 1)
            index += b * index_b + h * D
            ring_k += head * slots * D
            ring_v += head * slots * D
            n, width = bands_of(bands + head * OF_HEAD)
            length = tl.load(length_ptr + head)
            oldest, amount = (start % slots).to(tl.int32), due.to(tl.int32)
            NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
            k_page = page_bytes(n, NUMBER, G, PACKED)
            for at in range(0, amount, G):
                number, half = (length + at) // PAGE, ((length + at) % PAGE // HALF).to(tl.int32)
                put_group(ring_k, ring_v, slots, oldest + at, index, n, width, k + number * k_page,
                          v + number * v_page_bytes(width, dtype, D, G, PACKED), half, D, PAGE, G, PACKED)
            tl.debug_barrier()  # every thread has read the length before one of them changes it
            tl.store(length_ptr + head, length + due)
        tl.debug_barrier()  # and the start
        if tl.atomic_add(done + b, 1, sem="acq_rel") == H - 1:
            tl.store(start_ptr + b, start + due)
            tl.store(done + b, 0)
