"""Packed pages (eval.cache.storage.quantised): how the decode kernel reads them, and how tokens are packed into them.

A byte is a bfloat16 number as it lies, and a number is one fused multiplication and addition away.

A byte holds codes of different tiles of the products, so every tile of codes becomes an operand where it lies: no
number changes its thread between the load and the product. Every warp has a page, or half of one, of its own, [P, ...]
in all tiles: warps that shared it would unpack parts of it twice and wait for each other.

Values are multiplied as [channels, tokens] x [tokens, rows]: a product has at least 16 lines and 8 columns, and a tile
of one query token has 8 rows or fewer that count. So sums take half of the registers and instructions.

`move` packs the tokens that leave the window: the bytes are exactly those that PageSegment.append writes.

Names as in eval.cache.attention.kernels.parts. P is the number of warps, N that of columns. A half has HALF tokens; a
slab has D / 4 channels of V, which share a cell.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from leank import precision
from leank.eval.cache.attention.kernels.columns import CHANNELS
from leank.eval.cache.attention.kernels.parts import gather

HALF = tl.constexpr(32)  # tokens of a page that are multiplied at a time
ROOM = tl.constexpr(precision.ROOM)
AT_ONCE = tl.constexpr(32)  # lines of channels: all at once took 254 registers, which left room for two programs


class Codes(NamedTuple):
    """What `read` is compiled for, beside the decode kernel's `Form`."""

    BITS: int  # of a number, 2, 4 or 8
    CELL: int  # numbers of a cell, 32 or 64
    PTX: bool  # whether codes are unpacked in PTX, which Triton's interpreter cannot run


# fmt: off


@triton.constexpr_function
def unit_of(dtype, ptx):
    """What unpacked numbers are multiplied by; logits and results are divided by it in fp32.

    It leaves room for the scales of `instructions` in bfloat16. Scales of 2^59 and more, those of numbers beyond 10^18,
    become infinite there, and results NaN.
    """
    return 2.0**-64 if ptx and str(dtype) == "bf16" else 1.0


@triton.constexpr_function
def step_of(dtype, bits, place):
    """The number that `instructions` multiplies by the scale for code 1."""
    return 2.0 ** (place * bits - 133) if str(dtype) == "bf16" else 1.0


@triton.constexpr_function
def instructions(dtype, bits, place):
    """PTX for code * step_of * scale + zero of the codes in place `place` of four bytes, two numbers to a register.

    A byte below an empty one is, in bfloat16, a subnormal number or one of the lowest normal ones, which are 2^-133
    apart: it is 2^-133 times the byte, all 256 of them. In float16, a byte below 0x64 is 1024 more than the byte, and
    a first instruction makes codes of it exactly. The product is rounded once, with the zero point added.
    """
    first = place * bits  # the code's lowest bit
    keep = (2**bits - 1 << first) * 0x01010101
    return f"""{{ .reg .b32 c, a, b, one, less;
        and.b32 c, $2, {keep};
        {finish(dtype, first, 3)} }}"""


@triton.constexpr_function
def finish(dtype, first, register):
    """PTX for the rest of `instructions`: codes of c with the lowest bit `first`, scales from that register on."""
    upper, fma, exact = 0, "fma.rn.bf16x2", ""
    if str(dtype) == "fp16":
        one, less = 0x3C00 - (first << 10), 0xE400 - (first << 10)  # 2^-first and -1024 * 2^-first
        upper, fma = 0x64, "fma.rn.f16x2"
        exact = f"""mov.b32 one, {one * 0x10001}; mov.b32 less, {less * 0x10001};
        {fma} a, a, one, less; {fma} b, b, one, less;"""
    a, b, c, d = (f"${register + i}" for i in range(4))
    return f"""prmt.b32 a, c, {upper}, 0x4140; prmt.b32 b, c, {upper}, 0x4342;
        {exact}
        {fma} $0, a, {a}, {c}; {fma} $1, b, {b}, {d};"""


@triton.jit
def scale_and_zero(cells, scales, number, there):
    """Scale and zero point [P, R] of the cells `number`, zero where not there.

    cells, scales: address of cell 0's scale, as a pointer to words, and to the model's dtype
    Two scales, or two zero points, are a word: loads of 4 bytes can be asked for tiles ahead, loads of 2 cannot. So
    both of a pair are there, or neither.
    """
    dtype: tl.constexpr = scales.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        words = tl.load(cells + number, mask=there, other=0)
        P: tl.constexpr = number.shape[0]
        R: tl.constexpr = number.shape[1]
        pairs, zeros = tl.split(tl.reshape(words, [P, R // 2, 2]))  # words of two scales, and of two zero points
        scale = tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), [P, R]).to(dtype, bitcast=True)
        zero = tl.reshape(tl.join(zeros.to(tl.int16), (zeros >> 16).to(tl.int16)), [P, R]).to(dtype, bitcast=True)
    else:
        at = number // 2 * 4 + number % 2
        scale = tl.load(scales + at, mask=there, other=0.0)
        zero = tl.load(scales + at + 2, mask=there, other=0.0)
    return scale, zero


@triton.jit
def numbers(codes, scale, zero, PLACE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Numbers [P, R, N], times unit_of, of the codes in place PLACE of bytes; scale, zero: [P, R, 1] or [P, 1, N]."""
    dtype: tl.constexpr = scale.dtype
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    if PTX:
        if UNIT != 1.0:  # Triton would round a small Python number beside bfloat16 as if to float16, to 0
            scale *= tl.full([], UNIT / step_of(dtype, BITS, PLACE), tl.float32).to(dtype)
            zero *= tl.full([], UNIT, tl.float32).to(dtype)
        x = tl.inline_asm_elementwise(
            instructions(dtype, BITS, PLACE), "=r,=r,r,r,r,r,r", [codes, scale, zero],
            dtype=scale.dtype, is_pure=True, pack=4)
    else:
        code = ((codes >> (PLACE * BITS)) & (2**BITS - 1)).to(tl.float32)
        x = ((code * scale.to(tl.float32) + zero.to(tl.float32)) * UNIT).to(dtype)
    return x


@triton.jit
def _tokens():
    """The tokens of a half in the order of its logits, [HALF]: a thread has those that it multiplies by values."""
    j = tl.arange(0, HALF)
    return j % 8 // 2 * 8 + j // 8 * 2 + j % 2


@triton.jit
def _in_order(x):
    """Columns [P, N, HALF] in the order of _tokens, as rows in the order of tokens, [P, HALF, N]."""
    P: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.permute(tl.reshape(tl.permute(tl.reshape(x, [P, N, 4, 4, 2]), (0, 1, 3, 2, 4)), [P, N, HALF]), (0, 2, 1))


@triton.jit
def _logits(
    q0, q1, page, cells, scales, number, half, left, row, room, width, k_page,
    PLACE: tl.constexpr, CODES: tl.constexpr,
):
    """Logits of halves of pages, [P, M, HALF].

    q0, q1: queries [P, M, R] for the channels row, and at two bits, for those half of the head's channels later
    page: address of the first page
    number, half: [P], number of the page, and 0 or 1 for its half
    PLACE: where the half's codes lie in their bytes
    row: [R], columns of a page's bytes
    left: [P], tokens from a half's first to the last one
    room, width, k_page: channels for which there is room, bytes of a line of codes, bytes of a page
    """
    BITS: tl.constexpr = CODES.BITS
    NUMBER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    start = number * k_page
    line = _tokens()
    at = (start + (half * HALF * width if BITS == 8 else 0))[:, None, None]
    at = at + (line * width)[None, None, :] + row[None, :, None]
    there = (left > 0)[:, None] & (row < width)[None, :]
    codes = tl.load(page + at, mask=there[:, :, None], other=0)
    cell = (start // (2 * NUMBER) + half * HALF // CODES.CELL * room)[:, None] + row[None, :]
    scale, zero = scale_and_zero(cells, scales, cell, there)
    s = tl.dot(q0, numbers(codes, scale[:, :, None], zero[:, :, None], PLACE, BITS, CODES.PTX))
    if BITS == 2:
        scale, zero = scale_and_zero(cells, scales, cell + width, there)
        s = tl.dot(q1, numbers(codes, scale[:, :, None], zero[:, :, None], PLACE + 1, BITS, CODES.PTX), s)
    return s


@triton.jit
def _values(
    page, cells, scales, number, half, left,
    SLAB: tl.constexpr, V_PAGE: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr,
):
    """Values of halves of pages in slab SLAB, [P, D / 4, HALF], for the tokens before `left` [P] of a half.

    Later ones are zero, except the second token of a pair. That one has some number, since its group is stored whole,
    and its weight is zero.
    """
    W: tl.constexpr = F.D // 4
    LINES: tl.constexpr = CODES.BITS // 2  # slabs / codes of a byte
    NUMBER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    t = tl.arange(0, HALF)
    channel = SLAB % LINES * W + tl.arange(0, W)
    start = number * V_PAGE
    at = (start + half * HALF)[:, None, None] + (channel * F.PAGE)[None, :, None] + t[None, None, :]
    codes = tl.load(page + at, mask=(left > 0)[:, None, None], other=0)
    cell = (start // (2 * NUMBER) + half * HALF)[:, None] + (SLAB * W // CODES.CELL * F.PAGE + t)[None, :]
    scale, zero = scale_and_zero(cells, scales, cell, (t // 2 * 2)[None, :] < left[:, None])
    return numbers(codes, scale[:, None, :], zero[:, None, :], SLAB // LINES, CODES.BITS, CODES.PTX)


@triton.jit
def _queries(q_row, ok, index, channel, count, WARPS: tl.constexpr):
    """Query channels for every warp, [P, M, C]; zero from channel `count` on."""
    q = gather(q_row, ok, index, channel, count, False)
    return tl.broadcast_to(q[None, :, :], [WARPS, q.shape[0], q.shape[1]])


@triton.jit
def _masked(s, token, left, N: tl.constexpr):
    """The first N rows of logits s [P, M, HALF], M = N or 2 N; -inf from token `left` [P] of a half on."""
    if s.shape[1] > N:
        s, _ = tl.split(tl.permute(tl.reshape(s, [s.shape[0], 2, N, s.shape[2]]), (0, 2, 3, 1)))
    return tl.where(token[None, None, :] < left[:, None, None], s, float("-inf"))


@triton.jit
def _add(
    a0, a1, a2, a3, p, page, number, half, left, dtype: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr,
):
    """Add values times weights p [P, N, HALF] to every slab's sum, [P, D / 4, N]."""
    V_CODES: tl.constexpr = F.PAGE * F.D * CODES.BITS // 8
    V_PAGE: tl.constexpr = v_page_of(dtype, F.D, F.PAGE, CODES.BITS, CODES.CELL)
    cells = (page + V_CODES).to(tl.pointer_type(tl.int32), bitcast=True)
    scales = (page + V_CODES).to(tl.pointer_type(dtype), bitcast=True)
    x = _in_order(p.to(dtype))
    a0 = tl.dot(_values(page, cells, scales, number, half, left, 0, V_PAGE, F, CODES), x, a0)
    a1 = tl.dot(_values(page, cells, scales, number, half, left, 1, V_PAGE, F, CODES), x, a1)
    a2 = tl.dot(_values(page, cells, scales, number, half, left, 2, V_PAGE, F, CODES), x, a2)
    a3 = tl.dot(_values(page, cells, scales, number, half, left, 3, V_PAGE, F, CODES), x, a3)
    return a0, a1, a2, a3


@triton.jit
def _summed(x):
    """Sums [A, B, 2, 2] of x [P, A, B, 2, 2] over warps: halves are added, as tl.sum would exchange in one bank."""
    A: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    P: tl.constexpr = x.shape[0]
    x = tl.permute(x, (1, 2, 3, 4, 0))
    if P == 8:
        a, b = tl.split(tl.reshape(x, [A, B, 2, 2, 4, 2]))
        x = a + b
    if P >= 4:
        a, b = tl.split(tl.reshape(x, [A, B, 2, 2, 2, 2]))
        x = a + b
    a, b = tl.split(tl.reshape(x, [A, B, 2, 2, 2]))
    return a + b


@triton.jit
def _wider(x, other, M: tl.constexpr):
    """Rows of x and, where M is more, rows of `other` behind them."""
    if x.shape[0] < M:
        x = tl.join(x, tl.full(x.shape, other, tl.float32))
        if len(x.shape) == 3:
            x = tl.reshape(tl.permute(x, (2, 0, 1)), [M, x.shape[1]])
        else:
            x = tl.reshape(tl.permute(x, (1, 0)), [M])
    return x


@triton.jit
def _together(acc, m, z, a0, a1, a2, a3, top, sums, TILE: tl.constexpr, UNIT: tl.constexpr):
    """The softmax so far, acc, m and z, with all warps': a0 to a3 [P, D / 4, N], top [P, N], sums [P, N, HALF]."""
    M: tl.constexpr = acc.shape[0]
    most = tl.max(top, 0)
    share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most)[None, :])
    total = tl.sum(tl.sum(sums, 2) * share, 0)
    share = share[:, None, :] * (1.0 / UNIT)
    slabs = _summed(tl.join(tl.join(a0 * share, a2 * share), tl.join(a1 * share, a3 * share)))
    # [D / 4, N, 2, 2], the last two in order a0 a1, a2 a3
    found = tl.reshape(tl.permute(slabs, (1, 2, 3, 0)), [top.shape[1], acc.shape[1]])
    most, total, found = _wider(most, float("-inf"), M), _wider(total, 0.0, M), _wider(found, 0.0, M)
    new = tl.maximum(m, most)
    safe = tl.where(new == float("-inf"), 0.0, new)
    before, now = tl.exp2(m - safe), tl.exp2(most - safe)
    return acc * before[:, None] + found * now[:, None], new, z * before[:, None] + (total * now)[:, None] / TILE


@triton.constexpr_function
def v_page_of(dtype, dim, page, bits, cell):
    """Bytes of a page of V: its codes, then a scale and a zero point for every cell."""
    return page * dim * bits // 8 + page * dim // cell * 2 * dtype.primitive_bitwidth // 8


@triton.jit
def _sums(
    q_row, ok, index, layer, k_at, v_at, first, last, count, scale,
    C: tl.constexpr, N: tl.constexpr, F: tl.constexpr, CODES: tl.constexpr,
):
    """Every warp's softmax of tokens [first, last) of a packed part with up to C channels, as `_together` takes it.

    k_at, v_at: bytes from the layer's `codes` to where the head's K and V begin
    N: 8 where the tile has no more rows that count, else M
    """
    D: tl.constexpr = F.D
    PAGE: tl.constexpr = F.PAGE
    BITS: tl.constexpr = CODES.BITS
    WARPS: tl.constexpr = F.WARPS
    dtype: tl.constexpr = layer.base.dtype.element_ty
    WORD: tl.constexpr = 2 * dtype.primitive_bitwidth // 8  # bytes of scale and zero point
    V_PAGE: tl.constexpr = v_page_of(dtype, D, PAGE, BITS, CODES.CELL)
    SHARED: tl.constexpr = 2 if BITS == 2 else 1  # channels of a byte
    PARTS: tl.constexpr = 1 if BITS == 8 else 2  # halves that a warp reads at a time: those that share bytes of K
    UNIT: tl.constexpr = unit_of(dtype, CODES.PTX)
    if F.EVEN:
        count = count // 32 * 32  # as it is, but the compiler sees that lines are aligned
        room, width = count, count // 32 * (32 // SHARED)
    else:
        lots = (count + ROOM - 1) // ROOM
        room, width = lots * ROOM, lots * (ROOM // SHARED)
    k_codes = width * (PAGE if BITS == 8 else HALF)
    k_page = k_codes + PAGE // CODES.CELL * WORD * room
    k, v = tl.multiple_of(layer.codes + k_at, 16), tl.multiple_of(layer.codes + v_at, 16)
    row, token, warp = tl.arange(0, C // SHARED), _tokens(), tl.arange(0, WARPS)
    number, half = warp * PARTS // 2, warp * PARTS % 2
    q0 = _queries(q_row, ok, index, row, tl.minimum(width, count), WARPS)
    q1 = _queries(q_row, ok, index, width + row, count, WARPS) if BITS == 2 else q0
    scale *= 1.0 / UNIT

    top = tl.full([WARPS, N], float("-inf"), tl.float32)  # m and z of every warp
    sums = tl.zeros([WARPS, N, HALF], tl.float32)
    a0 = tl.zeros([WARPS, D // 4, N], tl.float32)
    a1, a2, a3 = a0, a0, a0
    for at in range(first, last, WARPS * PARTS * HALF):
        left = last - at - number * PAGE - half * HALF
        page = k + tl.multiple_of(at // PAGE * k_page, 16)
        cells = (page + k_codes).to(tl.pointer_type(tl.int32), bitcast=True)
        scales = (page + k_codes).to(layer.base.dtype, bitcast=True)
        # the logits of a warp's half of a page, and of the half whose codes share its bytes
        s = _logits(q0, q1, page, cells, scales, number, half, left, row, room, width, k_page, 0, CODES)
        s = _masked(s, token, left, N)
        new = tl.max(s, 2)
        if PARTS == 2:
            t = _logits(q0, q1, page, cells, scales, number, half + 1, left, row, room, width, k_page, 4 // BITS, CODES)
            t = _masked(t, token, left - HALF, N)
            new = tl.maximum(new, tl.max(t, 2))
        # one step of the online softmax; the scale is positive, so the maximum may come before it
        new = tl.maximum(top, new * scale)
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)
        top = new
        p = tl.exp2(s * scale - safe[:, :, None])
        sums = sums * alpha[:, :, None] + p
        alpha = alpha[:, None, :]
        page = v + tl.multiple_of(at // PAGE * V_PAGE, 16)
        a0, a1, a2, a3 = _add(a0 * alpha, a1 * alpha, a2 * alpha, a3 * alpha, p, page, number, half, left,
                              dtype, F, CODES)
        if PARTS == 2:
            p = tl.exp2(t * scale - safe[:, :, None])
            sums += p
            a0, a1, a2, a3 = _add(a0, a1, a2, a3, p, page, number, half + 1, left - HALF, dtype, F, CODES)
    return a0, a1, a2, a3, top, sums


@triton.jit
def read(
    acc, m, z, q_row, ok, index, layer, entry, k_at, v_at, first, last, scale,
    F: tl.constexpr, CODES: tl.constexpr,
):
    """Tokens [first, last) of a packed part; the form for 16 bits is `decode.middle`.

    q_row: [M], where the queries of a tile begin; ok: [M], which rows hold one
    index: the numbers of the head's kept channels
    entry: the split's line of the schedule
    k_at, v_at: bytes from the layer's `codes` to where the head's K and V begin
    scale: factor of the logits, positive

    An operand has at least 32 bytes of channels, which at two bits are 64.
    """
    N: tl.constexpr = 8 if F.ROWS <= 8 and acc.shape[0] == 16 else acc.shape[0]
    count = tl.load(entry + CHANNELS).to(tl.int32)
    if count <= 32 and CODES.BITS > 2:
        a0, a1, a2, a3, top, sums = _sums(q_row, ok, index, layer, k_at, v_at, first, last, count, scale,
                                          32 if CODES.BITS > 2 else 64, N, F, CODES)
    elif count <= 64 or F.D == 64:
        a0, a1, a2, a3, top, sums = _sums(q_row, ok, index, layer, k_at, v_at, first, last, count, scale,
                                          64, N, F, CODES)
    else:
        a0, a1, a2, a3, top, sums = _sums(q_row, ok, index, layer, k_at, v_at, first, last, count, scale,
                                          128, N, F, CODES)
    return _together(acc, m, z, a0, a1, a2, a3, top, sums, F.TILE, unit_of(layer.base.dtype.element_ty, CODES.PTX))


@triton.jit
def _scale(low, high, top):
    """(max - min) / top, the largest code, rounded to the model's dtype."""
    return tl.div_rn(high.to(tl.float32) - low.to(tl.float32), top).to(low.dtype)


@triton.jit
def _codes(x, scale, low, top):
    """Codes of numbers x up to top, in int32; scale, low and top have its shape."""
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    code = tl.div_rn(x.to(tl.float32) - low.to(tl.float32), step)
    code = (code + 12582912.0) - 12582912.0  # to the nearest whole number, of two that are as near the even one
    return tl.minimum(code, top).to(tl.int32)


@triton.jit
def _put_keys(
    ring, slots, page, oldest, index, row, count, width, room, half, BEGIN: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr,
):
    """Write a cell's tokens of the channels BEGIN * width + row, [R], into half `half` of a page.

    ring: the head's keys; oldest: slot of the cell's first token
    A byte's places are written from the lowest on, and the first write clears those above it.
    """
    dtype: tl.constexpr = ring.dtype.element_ty
    t = tl.arange(0, HALF)
    channel = BEGIN * width + row
    kept, there = channel < count, row < width
    picked = tl.load(index + channel, mask=kept, other=0)
    slot = (oldest + t) % slots
    x = tl.load(ring + slot[:, None] * D + picked[None, :], mask=kept[None, :], other=0.0)
    low, high = tl.min(x.to(tl.float32), 0), tl.max(x.to(tl.float32), 0)
    if CELL > HALF:
        slot = (oldest + HALF + t) % slots
        y = tl.load(ring + slot[:, None] * D + picked[None, :], mask=kept[None, :], other=0.0)
        low = tl.minimum(low, tl.min(y.to(tl.float32), 0))
        high = tl.maximum(high, tl.max(y.to(tl.float32), 0))
    low, high = low.to(dtype), high.to(dtype)
    scale = _scale(low, high, 2**BITS - 1.0)
    code = _codes(x, scale[None, :], low[None, :], 2**BITS - 1.0)
    if BITS == 8:
        at = (half * HALF + t)[:, None] * width + row[None, :]
        tl.store(page + at, code.to(tl.uint8), mask=there[None, :])
        if CELL > HALF:
            code = _codes(y, scale[None, :], low[None, :], 2**BITS - 1.0)
            tl.store(page + at + HALF * width, code.to(tl.uint8), mask=there[None, :])
    else:
        at = t[:, None] * width + row[None, :]
        code = code << (BEGIN * 2 + half * 4)
        if CELL > HALF:
            code |= _codes(y, scale[None, :], low[None, :], 2**BITS - 1.0) << (BEGIN * 2 + 4)
        if half + BEGIN > 0:
            tl.debug_barrier()  # what is there has been written
            code |= tl.load(page + at, mask=there[None, :], other=0).to(tl.int32)
        tl.store(page + at, code.to(tl.uint8), mask=there[None, :])
    number = half * HALF // CELL * room + channel
    scales = (page + width * (PAGE if BITS == 8 else HALF)).to(tl.pointer_type(dtype), bitcast=True)
    at = number // 2 * 4 + number % 2
    tl.store(scales + at, scale, mask=there)
    tl.store(scales + at + 2, low, mask=there)


@triton.jit
def _put_values(
    ring, slots, page, oldest, half, D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr,
):
    """Write HALF tokens of the window's values into half `half` of a page."""
    dtype: tl.constexpr = ring.dtype.element_ty
    PLACES: tl.constexpr = 8 // BITS
    LINES: tl.constexpr = D // PLACES  # lines of bytes
    WIDTH: tl.constexpr = LINES if LINES < CELL else CELL  # channels of a cell that share a place
    scales = (page + PAGE * D * BITS // 8).to(tl.pointer_type(dtype), bitcast=True)
    t = tl.arange(0, HALF)
    token = half * HALF + t
    slot = (oldest + t) % slots
    d, within = tl.arange(0, WIDTH), tl.arange(0, CELL)
    for line in range(0, LINES, WIDTH):
        code = tl.zeros([HALF, WIDTH], tl.int32)
        for place in tl.static_range(PLACES):
            first = (place * LINES + line) // CELL * CELL  # of the cell
            whole = tl.load(ring + slot[:, None] * D + (first + within)[None, :]).to(tl.float32)
            low, high = tl.min(whole, 1).to(dtype), tl.max(whole, 1).to(dtype)
            scale = _scale(low, high, 2**BITS - 1.0)
            x = whole
            if WIDTH < CELL:
                x = tl.load(ring + slot[:, None] * D + (place * LINES + line + d)[None, :]).to(tl.float32)
            code |= _codes(x, scale[:, None], low[:, None], 2**BITS - 1.0) << (place * BITS)
            at = first // CELL * PAGE + token
            at = at // 2 * 4 + at % 2
            tl.store(scales + at, scale)
            tl.store(scales + at + 2, low)
        tl.store(page + (line + d)[None, :] * PAGE + token[:, None], code.to(tl.uint8))


@triton.jit
def move(
    ring_k, ring_v, k, v, index, places, seen_ptr, start_ptr, length_ptr, done,
    index_b, slots, window, flush,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr,
):
    """Program (b, h): pack the due whole cells of row b's window behind head h's; see `ring.move`; places are bytes."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(start_ptr + b)
    due = tl.maximum(tl.load(seen_ptr + b) - start - window, 0) // flush * flush
    if due > 0:
        head = b * H + h
        count = tl.load(places + head * 4 + 2).to(tl.int32)
        if count > 0:
            NUMBER: tl.constexpr = ring_k.dtype.element_ty.primitive_bitwidth // 8
            SHARED: tl.constexpr = 2 if BITS == 2 else 1  # channels of a byte
            V_PAGE: tl.constexpr = PAGE * D * BITS // 8 + PAGE * D // CELL * 2 * NUMBER
            k += tl.load(places + head * 4)
            v += tl.load(places + head * 4 + 1)
            index += b * index_b + h * D
            ring_k += head * slots * D
            ring_v += head * slots * D
            lots = (count + ROOM - 1) // ROOM
            room, width = lots * ROOM, lots * (ROOM // SHARED)
            k_page = room * (PAGE * BITS // 8 + PAGE // CELL * 2 * NUMBER)
            length = tl.load(length_ptr + head)
            oldest, amount, held = (start % slots).to(tl.int32), due.to(tl.int32), length.to(tl.int32)
            for at in range(0, amount, CELL):
                page, half = (held + at) // PAGE, (held + at) % PAGE // HALF
                to = k + page.to(tl.int64) * k_page
                for first in range(0, width, AT_ONCE):
                    row = first + tl.arange(0, AT_ONCE)
                    for begin in tl.static_range(SHARED):
                        _put_keys(ring_k, slots, to, oldest + at, index, row, count, width, room, half, begin,
                                  D, PAGE, BITS, CELL)
                to = v + page.to(tl.int64) * V_PAGE
                for more in tl.static_range(0, CELL, HALF):
                    _put_values(ring_v, slots, to, oldest + at + more, half + more // HALF, D, PAGE, BITS, CELL)
            tl.debug_barrier()  # every thread has read the length before one of them changes it
            tl.store(length_ptr + head, length + due)
        tl.debug_barrier()  # and the start
        if tl.atomic_add(done + b, 1, sem="acq_rel") == H - 1:
            tl.store(start_ptr + b, start + due)
            tl.store(done + b, 0)
