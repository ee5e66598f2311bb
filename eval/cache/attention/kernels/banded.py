"""Pages of bands (eval.cache.storage.banded): how the decode kernel reads them, and how tokens are packed into them.

A band is a page of KIVI's codec, so codes become numbers as in `packed`, of which this is the form for several widths:
every warp has a page of its own, reads one band of K after the other, adds their products to the page's logits, and
then reads V. So a head takes as many bytes as its layout says, and its pages are read once.

`read` is compiled for a few forms of heads (`storage.banded.forms`), each a loop of its own, in which Triton asks for
the next pages while it multiplies. A loop takes a plane's lines in pieces, and leaves out those that a head lacks.

Names as in eval.cache.attention.kernels.packed. A *line* of a plane is a byte for every 64 tokens, or 32 below 8 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

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
    scale_and_zero,
    step_of,
    unit_of,
)
from leank.eval.cache.storage import banded
from leank.precision import GROUP

CELL = tl.constexpr(GROUP)
BANDS = tl.constexpr(len(banded.BANDS))


class Codes(NamedTuple):
    """What `read` is compiled for, beside the decode kernel's `Form`."""

    FORMS: tuple[Any, ...]  # of heads, see `storage.banded.forms`
    PAGES: tuple[int, ...]  # bytes of a page of K and V for which each has room
    AHEAD: int  # bytes that a program may ask for before it needs them
    PTX: bool  # whether codes are unpacked in PTX, which Triton's interpreter cannot run


# fmt: off


@triton.constexpr_function
def bits_of(band):
    """Bits of the band of that number."""
    return banded.BANDS[band]


@triton.constexpr_function
def room_of(codes, form, band):
    """Channels of a band for which a form has room; behind the last band, the bits of V."""
    return codes.FORMS[form][band]


@triton.constexpr_function
def first_plane(bits):
    """Bits of a code's first plane."""
    return 2 if bits == 3 else bits


@triton.constexpr_function
def channel_of(dtype, page, bits):
    """Bytes of a channel in a page of K: its codes, and a scale and a zero point of all tokens."""
    number = dtype.primitive_bitwidth // 8
    return page * number if bits == 16 else page * bits // 8 + 2 * number


@triton.constexpr_function
def v_page_of(dtype, dim, page, bits):
    """Bytes of a page of V."""
    number = dtype.primitive_bitwidth // 8
    return page * dim * number if bits == 16 else page * dim * bits // 8 + page * dim // GROUP * 2 * number


@triton.constexpr_function
def parts_of(bits):
    """How many channels share the bytes of a plane; at 3 bits, of the plane of the highest bits."""
    return {2: 2, 3: 4}.get(bits, 1)


@triton.constexpr_function
def piece_of(bits):
    """Lines of a piece: what a product sums at least, of a plane or of a band in 16 bits."""
    return 16 if bits == 16 else banded.LEAST_LINES


@triton.constexpr_function
def pieces_of(room, bits):
    """Pieces of a band of `bits` with so many channels."""
    return -(-room // (parts_of(bits) * piece_of(bits)))


@triton.constexpr_function
def stages_of(codes, form, warps):
    """How many pages a program asks for ahead, and one."""
    return 3 if 2 * warps * codes.PAGES[form] <= codes.AHEAD else 2


@triton.constexpr_function
def unit_of_form(dtype, ptx, value_bits):
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
def joined(codes, top, scale, zero, PLACE: tl.constexpr, BIT: tl.constexpr, PTX: tl.constexpr):
    """Numbers of 3 bits as `packed.numbers`; codes: the lower two in place PLACE; top: the highest in bit BIT."""
    dtype: tl.constexpr = scale.dtype
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    if PTX:
        if UNIT != 1.0:
            scale *= tl.full([], UNIT / step_of(dtype, lowest_of(PLACE), 1), tl.float32).to(dtype)
            zero *= tl.full([], UNIT, tl.float32).to(dtype)
        x = tl.inline_asm_elementwise(
            joining(dtype, PLACE, BIT), "=r,=r,r,r,r,r,r,r", [codes, top, scale, zero],
            dtype=scale.dtype, is_pure=True, pack=4)
    else:
        code = ((codes >> (2 * PLACE)) & 3) | (((top >> BIT) & 1) << 2)
        x = ((code.to(tl.float32) * scale.to(tl.float32) + zero.to(tl.float32)) * UNIT).to(dtype)
    return x


@triton.jit
def _part(q_row, ok, index, n, lines, row, PART: tl.constexpr, F: tl.constexpr):
    """Queries [P, M, R] for the channels whose codes lie in part PART of a plane's lines `row` [R]."""
    channel = PART * lines + row
    return _queries(q_row, ok, index, channel, tl.minimum((PART + 1) * lines, n), F.WARPS)


@triton.jit
def _parts(q_row, ok, index, n, BITS: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """Queries for every piece of a band with up to C channels, and every part of its bytes."""
    PARTS: tl.constexpr = parts_of(BITS)
    lots = (n + ROOM - 1) // ROOM
    found = tl.tuple([])
    for j in tl.static_range(pieces_of(C, BITS)):
        row = tl.arange(0, piece_of(BITS)) + j * piece_of(BITS)
        for i in tl.static_range(PARTS):
            found += (_part(q_row, ok, index, n, lots * (ROOM // PARTS), row, i, F),)
    return found


@triton.jit
def _band(
    s, t, q, page, start, left, n, dtype: tl.constexpr,
    BITS: tl.constexpr, C: tl.constexpr, F: tl.constexpr, PTX: tl.constexpr,
):
    """Add the products of a band of n channels, at most C, to the logits s and t of a page's halves, [P, M, HALF].

    q: queries from `_parts`
    page: address of the band in the first page; start: [P], bytes to the page that each warp reads
    left: [P], tokens from a page's first to the last one

    Returns s, t and the bytes of the band.
    """
    lots = (n + ROOM - 1) // ROOM
    size = lots * (ROOM * F.PAGE * BITS // 8)
    cells = (page + size).to(tl.pointer_type(tl.int32), bitcast=True)
    scales = (page + size).to(tl.pointer_type(dtype), bitcast=True)
    for j in tl.static_range(pieces_of(C, BITS)):
        s, t = _piece(s, t, q, page, cells, scales, start, left, lots * (ROOM // parts_of(BITS)), j, BITS, PTX)
    return s, t, lots * (ROOM * channel_of(dtype, F.PAGE, BITS))


@triton.jit
def _piece(
    s, t, q, page, cells, scales, start, left, lines, J: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr,
):
    """Do what `_band` does for piece J of its lines; cells, scales: see `packed.scale_and_zero`.

    Everything is asked for before it is known whether the head has such lines, so that Triton asks ahead of time; of
    what is not there, no byte is read, and nothing is computed. At 3 bits, a line of the highest bits belongs to two of
    the lower ones.
    """
    PARTS: tl.constexpr = parts_of(BITS)
    NUMBER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    row = tl.arange(0, piece_of(BITS)) + J * piece_of(BITS)
    there = (left > 0)[:, None] & (row < lines)[None, :]
    first = start[:, None, None] + row[None, :, None]
    at = first + (_tokens() * (2 * lines if BITS == 3 else lines))[None, None, :]
    codes = tl.load(page + at, mask=there[:, :, None], other=0)
    later, top = codes, codes
    if BITS == 8:
        later = tl.load(page + at + HALF * lines, mask=there[:, :, None], other=0)
    if BITS == 3:
        later = tl.load(page + at + lines, mask=there[:, :, None], other=0)
        top = tl.load(page + HALF * 2 * lines + first + (_tokens() * lines)[None, None, :], mask=there[:, :, None],
                      other=0)
    pairs = tl.tuple([])
    for i in tl.static_range(PARTS):
        cell = (start // (2 * NUMBER))[:, None] + (i * lines + row)[None, :]
        pairs += scale_and_zero(cells, scales, cell, there)
    if lines > J * piece_of(BITS):
        for i in tl.static_range(PARTS):
            scale, zero = pairs[2 * i][:, :, None], pairs[2 * i + 1][:, :, None]
            if BITS == 3:
                lower = codes if i % 2 == 0 else later
                x = joined(lower, top, scale, zero, i // 2, i, PTX)
                y = joined(lower, top, scale, zero, i // 2 + 2, i + 4, PTX)
            else:
                x = numbers(codes, scale, zero, i, BITS, PTX)
                y = numbers(later, scale, zero, 0 if BITS == 8 else 4 // BITS + i, BITS, PTX)
            s = tl.dot(q[J * PARTS + i], x, s)
            t = tl.dot(q[J * PARTS + i], y, t)
    return s, t


@triton.jit
def _whole(s, t, q, page, start, left, room, C: tl.constexpr):
    """Add a 16-bit band's products to the logits, s and t; page: its address in the first page, of numbers."""
    for j in tl.static_range(pieces_of(C, 16)):
        row = tl.arange(0, piece_of(16)) + j * piece_of(16)
        at = start[:, None, None] + (_tokens() * room)[None, None, :] + row[None, :, None]
        there = ((left > 0)[:, None] & (row < room)[None, :])[:, :, None]
        first = tl.load(page + at, mask=there, other=0.0)
        later = tl.load(page + at + HALF * room, mask=there, other=0.0)
        if room > j * piece_of(16):
            s = tl.dot(q[j], first, s)
            t = tl.dot(q[j], later, t)
    return s, t


@triton.jit
def _values(
    page, start, left, top, half: tl.constexpr, SLAB: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, PTX: tl.constexpr,
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
        scale, zero = _scales_of_values(page, start, left, half, SLAB, dtype, F, V)
        scale, zero = scale[:, None, :], zero[:, None, :]
        if V == 3:
            found = joined(codes, top, scale, zero, SLAB, half * 4 + SLAB, PTX)
        else:
            found = numbers(codes, scale, zero, SLAB // LINES, BITS, PTX)
    return found


@triton.jit
def _scales_of_values(
    page, start, left, half, SLAB: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
):
    """Scales and zero points [P, HALF] of a slab's values."""
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    SIZE: tl.constexpr = F.PAGE * F.D * V // 8
    cells = (page + SIZE).to(tl.pointer_type(tl.int32), bitcast=True)
    scales = (page + SIZE).to(tl.pointer_type(dtype), bitcast=True)
    cell = tl.arange(0, HALF) + (SLAB * (F.D // 4) // CELL * F.PAGE + half * HALF)
    there = (left > 0)[:, None] & (cell >= 0)[None, :]
    return scale_and_zero(cells, scales, (start // (2 * NUMBER))[:, None] + cell[None, :], there)


@triton.jit
def _add(
    a0, a1, a2, a3, p, page, start, left, half: tl.constexpr, dtype: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    PTX: tl.constexpr,
):
    """Add values times weights p [P, N, HALF] to every slab's sum, [P, D / 4, N]."""
    W: tl.constexpr = F.D // 4
    x = _in_order(p.to(dtype))
    top = 0
    if V == 3:
        at = (start + F.PAGE * F.D // 4)[:, None, None] + (tl.arange(0, W) * HALF)[None, :, None]
        top = tl.load(page + at + tl.arange(0, HALF)[None, None, :], mask=(left > 0)[:, None, None], other=0)
    a0 = tl.dot(_values(page, start, left, top, half, 0, dtype, F, V, PTX), x, a0)
    a1 = tl.dot(_values(page, start, left, top, half, 1, dtype, F, V, PTX), x, a1)
    a2 = tl.dot(_values(page, start, left, top, half, 2, dtype, F, V, PTX), x, a2)
    a3 = tl.dot(_values(page, start, left, top, half, 3, dtype, F, V, PTX), x, a3)
    return a0, a1, a2, a3


@triton.jit
def _sums(
    q_row, ok, index, layer, k_at, v_at, first, last, n, scale,
    FORM: tl.constexpr, N: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr,
):
    """Every warp's softmax of tokens [first, last) of a part whose bands have n channels, for `packed._together`."""
    D: tl.constexpr = F.D
    PAGE: tl.constexpr = F.PAGE
    WARPS: tl.constexpr = F.WARPS
    K16: tl.constexpr = room_of(CODES, FORM, 0)
    V: tl.constexpr = room_of(CODES, FORM, BANDS)
    PTX: tl.constexpr = CODES.PTX
    dtype: tl.constexpr = layer.base.dtype.element_ty
    NUMBER: tl.constexpr = dtype.primitive_bitwidth // 8
    V_PAGE: tl.constexpr = v_page_of(dtype, D, PAGE, V)
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    k, v = tl.multiple_of(layer.codes + k_at, 16), tl.multiple_of(layer.codes + v_at, 16)
    token, number = _tokens(), tl.arange(0, WARPS)
    q16 = tl.tuple([])
    for j in tl.static_range(pieces_of(K16, 16)):
        row = tl.arange(0, piece_of(16)) + j * piece_of(16)
        of_piece = _queries(q_row, ok, index, row, n[0], WARPS)
        if UNIT != 1.0:  # codes are as small
            of_piece *= tl.full([], UNIT, tl.float32).to(dtype)
        q16 += (of_piece,)
    room = (n[0] + ROOM - 1) // ROOM * ROOM
    k_page = room * (PAGE * NUMBER)
    index += n[0]
    q = tl.tuple([])
    for i in tl.static_range(1, BANDS):
        of_band = 0
        if room_of(CODES, FORM, i) > 0:
            of_band = _parts(q_row, ok, index, n[i], bits_of(i), room_of(CODES, FORM, i), F)
            k_page += (n[i] + ROOM - 1) // ROOM * (ROOM * channel_of(dtype, PAGE, bits_of(i)))
        q += (of_band,)
        index += n[i]
    scale *= 1.0 / UNIT

    top = tl.full([WARPS, N], float("-inf"), tl.float32)  # m and z of every warp
    sums = tl.zeros([WARPS, N, HALF], tl.float32)
    a0 = tl.zeros([WARPS, D // 4, N], tl.float32)
    a1, a2, a3 = a0, a0, a0
    M: tl.constexpr = ok.shape[0]
    for at in tl.range(first, last, WARPS * PAGE, num_stages=stages_of(CODES, FORM, WARPS)):
        left = last - at - number * PAGE
        start = number * k_page
        page = k + tl.multiple_of(at // PAGE * k_page, 16)
        s = tl.zeros([WARPS, M, HALF], tl.float32)
        t = s
        if K16 > 0:
            of_numbers = page.to(tl.pointer_type(dtype), bitcast=True)
            s, t = _whole(s, t, q16, of_numbers, start // NUMBER, left, room, K16)
            page += tl.multiple_of(room * (PAGE * NUMBER), 16)
        for i in tl.static_range(1, BANDS):
            if room_of(CODES, FORM, i) > 0:
                s, t, size = _band(s, t, q[i - 1], page, start, left, n[i], dtype,
                                   bits_of(i), room_of(CODES, FORM, i), F, PTX)
                page += tl.multiple_of(size, 16)
        s, t = _masked(s, token, left, N), _masked(t, token, left - HALF, N)
        # one step of the online softmax; the scale is positive, so the maximum may come before it
        new = tl.maximum(top, tl.maximum(tl.max(s, 2), tl.max(t, 2)) * scale)
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)
        top = new
        p = tl.exp2(s * scale - safe[:, :, None])
        sums = sums * alpha[:, :, None] + p
        alpha = alpha[:, None, :]
        page = v + tl.multiple_of(at // PAGE * V_PAGE, 16)
        start = number * V_PAGE
        a0, a1, a2, a3 = _add(a0 * alpha, a1 * alpha, a2 * alpha, a3 * alpha, p, page, start, left, 0, dtype, F, V, PTX)
        p = tl.exp2(t * scale - safe[:, :, None])
        sums += p
        a0, a1, a2, a3 = _add(a0, a1, a2, a3, p, page, start, left, 1, dtype, F, V, PTX)
    return a0, a1, a2, a3, top, sums


@triton.jit
def read(
    acc, m, z, q_row, ok, index, layer, k_at, v_at, first, last, count, width, scale,
    F: tl.constexpr, CODES: tl.constexpr,
):
    """Tokens [first, last) of a part whose pages have bands; the form for one width is `packed.read`.

    count: channels at 16, 8 and 4 bits; width: those at 3 and 2 bits, then the number of the head's form; in bytes, the
        lowest first
    """
    N: tl.constexpr = 8 if F.ROWS <= 8 and acc.shape[0] == 16 else acc.shape[0]
    n = (count & 0xFF, (count >> 8) & 0xFF, (count >> 16) & 0xFF, width & 0xFF, (width >> 8) & 0xFF)
    form = width >> 16
    for i in tl.static_range(len(CODES.FORMS)):
        if form == i:
            a0, a1, a2, a3, top, sums = _sums(q_row, ok, index, layer, k_at, v_at, first, last, n, scale,
                                              i, N, F, CODES)
            acc, m, z = _together(acc, m, z, a0, a1, a2, a3, top, sums, F.TILE,
                                  unit_of_form(layer.base.dtype.element_ty, CODES.PTX, room_of(CODES, i, BANDS)))
    return acc, m, z


@triton.jit
def _due(ring, slots, oldest, index, channel, n, D: tl.constexpr):
    """The 64 tokens of a group for the band's channels [R], as two halves [HALF, R]; zeros from channel n on."""
    kept, t = channel < n, tl.arange(0, HALF)
    at = tl.load(index + channel, mask=kept, other=0)[None, :]
    first = tl.load(ring + ((oldest + t) % slots)[:, None] * D + at, mask=kept[None, :], other=0.0)
    return first, tl.load(ring + ((oldest + HALF + t) % slots)[:, None] * D + at, mask=kept[None, :], other=0.0)


@triton.jit
def _put_keys(
    ring, slots, oldest, index, n, lines, plane, scales,
    BITS: tl.constexpr, OF: tl.constexpr, LOWER: tl.constexpr, D: tl.constexpr,
):
    """Write tokens into a plane of a band, of codes of OF bits those BITS above LOWER; the lowest's with scales."""
    dtype: tl.constexpr = ring.dtype.element_ty
    PARTS: tl.constexpr = 4 // BITS if BITS < 4 else 1
    t = tl.arange(0, HALF)
    for first in range(0, lines, AT_ONCE):
        row = first + tl.arange(0, AT_ONCE)
        there = row < lines
        at = t[:, None] * lines + row[None, :]
        byte = tl.zeros([HALF, AT_ONCE], tl.int32)
        for i in tl.static_range(PARTS):
            channel = i * lines + row
            x, y = _due(ring, slots, oldest, index, tl.where(there, channel, n), n, D)
            low = tl.minimum(tl.min(x.to(tl.float32), 0), tl.min(y.to(tl.float32), 0)).to(dtype)
            high = tl.maximum(tl.max(x.to(tl.float32), 0), tl.max(y.to(tl.float32), 0)).to(dtype)
            scale = _scale(low, high, OF)
            code = _codes(x, scale[None, :], low[None, :], OF) >> LOWER & (2**BITS - 1)
            later = _codes(y, scale[None, :], low[None, :], OF) >> LOWER & (2**BITS - 1)
            if BITS == 8:
                tl.store(plane + at, code.to(tl.uint8), mask=there[None, :])
                tl.store(plane + at + HALF * lines, later.to(tl.uint8), mask=there[None, :])
            byte |= code << (i * BITS) | later << (i * BITS + 4)
            if LOWER == 0:
                cell = channel // 2 * 4 + channel % 2
                tl.store(scales + cell, scale, mask=there)
                tl.store(scales + cell + 2, low, mask=there)
        if BITS < 8:
            tl.store(plane + at, byte.to(tl.uint8), mask=there[None, :])


@triton.jit
def _put_whole(ring, slots, oldest, index, n, room, page, D: tl.constexpr):
    """Write a group of tokens into a band of 16 bits."""
    t = tl.arange(0, HALF)
    for first in range(0, room, AT_ONCE):
        row = first + tl.arange(0, AT_ONCE)
        x, y = _due(ring, slots, oldest, index, row, n, D)
        at = t[:, None] * room + row[None, :]
        tl.store(page + at, x, mask=(row < room)[None, :])
        tl.store(page + at + HALF * room, y, mask=(row < room)[None, :])


@triton.jit
def _quarters(code, D: tl.constexpr):
    """Quarters [HALF, D / 4] of codes [HALF, D]."""
    parts = tl.permute(tl.reshape(code, [HALF, 2, 2, D // 4]), (0, 3, 1, 2))
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _put_values(ring, slots, oldest, page, half: tl.constexpr, V: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Write half a group of tokens of V into a page; returns the highest of 3 bits, four to a number [HALF, D / 4]."""
    dtype: tl.constexpr = ring.dtype.element_ty
    t, d = tl.arange(0, HALF), tl.arange(0, D)
    token, top = t + half * HALF, 0
    x = tl.load(ring + ((oldest + token) % slots)[:, None] * D + d[None, :])
    if V == 16:
        tl.store(page.to(tl.pointer_type(dtype), bitcast=True) + d[None, :] * PAGE + token[:, None], x)
    else:
        cells = tl.reshape(x.to(tl.float32), [HALF, D // CELL, CELL])
        low, high = tl.min(cells, 2).to(dtype), tl.max(cells, 2).to(dtype)
        scale = _scale(low, high, V)
        code = tl.reshape(_codes(cells, scale[:, :, None], low[:, :, None], V), [HALF, D])
        scales = (page + PAGE * D * V // 8).to(tl.pointer_type(dtype), bitcast=True)
        cell = tl.arange(0, D // CELL)[None, :] * PAGE + token[:, None]
        cell = cell // 2 * 4 + cell % 2
        tl.store(scales + cell, scale)
        tl.store(scales + cell + 2, low)
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
def _put_band(
    ring, slots, oldest, index, n, page, BITS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):
    """Write a group of tokens into a band of a page; returns its bytes."""
    dtype: tl.constexpr = ring.dtype.element_ty
    PLANE: tl.constexpr = first_plane(BITS)
    room = (n + ROOM - 1) // ROOM * ROOM
    if BITS == 16:
        _put_whole(ring, slots, oldest, index, n, room, page.to(tl.pointer_type(dtype), bitcast=True), D)
    else:
        scales = (page + room * (PAGE * BITS // 8)).to(tl.pointer_type(dtype), bitcast=True)
        _put_keys(ring, slots, oldest, index, n, room // 2 if PLANE == 2 else room, page, scales, PLANE, BITS, 0, D)
        if BITS == 3:
            _put_keys(ring, slots, oldest, index, n, room // 4, page + room * (PAGE // 4), scales, 1, BITS, 2, D)
    return room * channel_of(dtype, PAGE, BITS)


@triton.jit
def _put_page(ring, slots, oldest, page, V: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Write a group of tokens into a page of V."""
    first = _put_values(ring, slots, oldest, page, 0, V, D, PAGE)
    later = _put_values(ring, slots, oldest, page, 1, V, D, PAGE)
    if V == 3:
        line = tl.arange(0, D // 4)[None, :] * HALF + tl.arange(0, HALF)[:, None]
        tl.store(page + PAGE * D // 4 + line, (first | later << 4).to(tl.uint8))


@triton.jit
def move(
    ring_k, ring_v, k, v, index, places, bands, seen_ptr, start_ptr, length_ptr, done,
    index_b, slots, window, flush, H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):
    """Program (b, h): pack the due whole groups of row b's window behind those that head h holds; see `packed.move`.

    bands: int32 [H, BANDS + 1], channels of every band, then the bits of V
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
            bands += h * (BANDS + 1)
            width = tl.load(bands + BANDS)
            length = tl.load(length_ptr + head)
            oldest, amount = (start % slots).to(tl.int32), due.to(tl.int32)
            k_page = 0
            for i in tl.static_range(BANDS):
                k_page += (tl.load(bands + i) + ROOM - 1) // ROOM * (ROOM * channel_of(dtype, PAGE, bits_of(i)))
            for at in range(0, amount, PAGE):
                page = k + (length + at) // PAGE * k_page
                of = index
                for i in tl.static_range(BANDS):
                    n = tl.load(bands + i)
                    page += _put_band(ring_k, slots, oldest + at, of, n, page, bits_of(i), D, PAGE)
                    of += n
                for i in tl.static_range(BANDS):
                    if width == bits_of(i):
                        page = v + (length + at) // PAGE * v_page_of(dtype, D, PAGE, bits_of(i))
                        _put_page(ring_v, slots, oldest + at, page, bits_of(i), D, PAGE)
            tl.debug_barrier()  # every thread has read the length before one of them changes it
            tl.store(length_ptr + head, length + due)
        tl.debug_barrier()  # and the start
        if tl.atomic_add(done + b, 1, sem="acq_rel") == H - 1:
            tl.store(start_ptr + b, start + due)
            tl.store(done + b, 0)
