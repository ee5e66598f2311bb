"""The middle's part of the decode kernel where its numbers are packed (eval.cache.storage.quantised).

A byte holds codes of different tiles of the products, so every tile of codes becomes an operand where it lies: no
number changes its thread between the load and the product. Every warp has a page of its own, [P, ...] in all tiles:
warps that shared a page would unpack parts of it twice and wait for each other, and unpacking is what takes time.

Names as in eval.cache.attention.kernel. A half has HALF tokens; a block has D / 4 channels of V, which share a cell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention.kernel_middle import gather

HALF = tl.constexpr(32)  # tokens of a page that are multiplied at a time
PAGES = tl.constexpr(4)  # P: pages that a program reads at a time

# fmt: off


@triton.constexpr_function
def _offset(dtype, bits):
    """The power of two to which a code is added in the highest bits of the lower byte, and its own upper byte.

    A lower byte of bfloat16 is the exponent's last bit and the fraction; of float16, the fraction's last 8 bits of 10.
    """
    return {
        ("bf16", 2): (4, 0x40), ("bf16", 4): (16, 0x41), ("fp16", 2): (16, 0x4C), ("fp16", 4): (64, 0x54),
    }[str(dtype), bits]


@triton.constexpr_function
def _origin(dtype, bits):
    """PTX for zero - offset * scale, two cells to a register."""
    offset = {"bf16": {4: "C080", 16: "C180"}, "fp16": {16: "CC00", 64: "D400"}}[str(dtype)][_offset(dtype, bits)[0]]
    return f"{{ .reg .b32 offset; mov.b32 offset, 0x{offset}{offset}; fma.rn.{dtype}x2 $0, $1, offset, $2; }}".replace(
        "fp16", "f16")


@triton.constexpr_function
def _instructions(dtype, bits, place):
    """PTX for (offset + code) * scale + origin of the codes in place `place` of four bytes, two numbers to a register.

    offset + code is exact, and the product is rounded once, with the origin added.
    """
    top = (7 if str(dtype) == "bf16" else 8) - bits  # the code's lowest bit
    move = f"shl.b32 c, $2, {top - place * bits}" if top >= place * bits else f"shr.b32 c, $2, {place * bits - top}"
    keep, more = (2**bits - 1 << top) * 0x01010101, 0x80808080 if str(dtype) == "bf16" else 0
    fma, upper = f"fma.rn.{dtype}x2".replace("fp16", "f16"), _offset(dtype, bits)[1]
    return f"""{{ .reg .b32 c, a, b;
        {move}; lop3.b32 c, c, {keep}, {more}, 0xEA;
        prmt.b32 a, c, {upper}, 0x4140; prmt.b32 b, c, {upper}, 0x4342;
        {fma} $0, a, $3, $5; {fma} $1, b, $4, $6; }}"""


@triton.jit
def _ends(cells, ends, number, there, BITS: tl.constexpr, PTX: tl.constexpr):
    """Scale and zero point of the cells `number`, zero where not there; in PTX the origin in place of the zero point.

    cells: address of cell 0's scale, as a pointer to words
    ends: the same address, as a pointer to the model's dtype

    Two halves of one word: loads of 4 bytes can be asked for tiles ahead, loads of 2 cannot.
    """
    dtype: tl.constexpr = ends.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        both = tl.load(cells + number, mask=there, other=0)
        scale = both.to(tl.int16).to(dtype, bitcast=True)
        zero = (both >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        scale = tl.load(ends + 2 * number, mask=there, other=0.0)
        zero = tl.load(ends + 2 * number + 1, mask=there, other=0.0)
    if PTX and BITS < 8:
        zero = tl.inline_asm_elementwise(
            _origin(dtype, BITS), "=r,r,r", [scale, zero], dtype=scale.dtype, is_pure=True, pack=2)
    return scale, zero


@triton.jit
def _numbers(codes, scale, zero, PLACE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Numbers [P, R, N] of the codes in place PLACE of bytes [P, R, N]; scale and zero point [P, R], from _ends."""
    dtype: tl.constexpr = scale.dtype
    if PTX and BITS < 8:
        x = tl.inline_asm_elementwise(
            _instructions(dtype, BITS, PLACE), "=r,=r,r,r,r,r,r", [codes, scale[:, :, None], zero[:, :, None]],
            dtype=scale.dtype, is_pure=True, pack=4)
    else:
        code = ((codes >> (PLACE * BITS)) & (2**BITS - 1)).to(tl.float32)
        x = (code * scale.to(tl.float32)[:, :, None] + zero.to(tl.float32)[:, :, None]).to(dtype)
    return x


@triton.jit
def _logits(
    q0, q1, page, cells, ends, left, row, count, width, k_page, PART: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Half PART of the logits of pages, [P, M, HALF].

    q0, q1: queries [P, M, R] for the channels row, and at two bits, for those half of the head's channels later
    page: address of the first page
    row: [R], columns of a page's bytes
    left: [P], tokens from a page's first to the last one
    width, k_page: bytes of a line of codes, and of a page
    """
    NUMBER: tl.constexpr = ends.dtype.element_ty.primitive_bitwidth // 8
    p = tl.arange(0, PAGES)
    line = tl.arange(0, HALF) + (PART * HALF if BITS == 8 else 0)
    at = (p * k_page)[:, None, None] + (line * width)[None, None, :] + row[None, :, None]
    there = (left > 0)[:, None]
    if BITS == 2 or not EVEN:
        there = there & (row < width)[None, :]
    codes = tl.load(page + at, mask=there[:, :, None], other=0)
    number = (p * (k_page // (2 * NUMBER)))[:, None] + (row + count * (PART * HALF // CELL))[None, :]
    scale, zero = _ends(cells, ends, number, there, BITS, PTX)
    s = tl.dot(q0, _numbers(codes, scale, zero, 2 * PART if BITS == 2 else PART if BITS == 4 else 0, BITS, PTX))
    if BITS == 2:
        there = there & (row + width < count)[None, :]
        scale, zero = _ends(cells, ends, number + width, there, BITS, PTX)
        s = tl.dot(q1, _numbers(codes, scale, zero, 2 * PART + 1, BITS, PTX), s)
    return s


@triton.jit
def _values(
    page, cells, ends, left, PART: tl.constexpr, BLOCK: tl.constexpr, V_PAGE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Half PART of the values of pages in block BLOCK, [P, HALF, D / 4]; zero from token `left` [P] of a page on."""
    W: tl.constexpr = D // 4
    LINES: tl.constexpr = BITS // 2  # blocks / codes of a byte
    NUMBER: tl.constexpr = ends.dtype.element_ty.primitive_bitwidth // 8
    p, t = tl.arange(0, PAGES), tl.arange(0, HALF) + PART * HALF
    channel = BLOCK % LINES * W + tl.arange(0, W)
    at = (p * V_PAGE)[:, None, None] + (channel * PAGE)[None, None, :] + t[None, :, None]
    codes = tl.load(page + at, mask=(left > 0)[:, None, None], other=0)
    number = (p * (V_PAGE // (2 * NUMBER)))[:, None] + (BLOCK * W // CELL * PAGE + t)[None, :]
    scale, zero = _ends(cells, ends, number, t[None, :] < left[:, None], BITS, PTX)
    return _numbers(codes, scale, zero, BLOCK // LINES, BITS, PTX)


@triton.jit
def _queries(q_row, ok, index, channel, count, EVEN: tl.constexpr):
    """Query channels for every page, [P, M, C]."""
    q = gather(q_row, ok, index, channel, count, EVEN)
    return tl.broadcast_to(q[None, :, :], [PAGES, q.shape[0], q.shape[1]])


@triton.jit
def packed_middle(
    acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Tokens [first, last) of a packed part; the plain form is kernel_middle.middle.

    base, bytes_base: one address, from which the head's K and V begin k_at and v_at bytes on
    PTX: whether the target is a GPU, which Triton's interpreter is not
    """
    M: tl.constexpr = acc.shape[0]
    W: tl.constexpr = D // 4
    WORD: tl.constexpr = 2 * base.dtype.element_ty.primitive_bitwidth // 8  # bytes of scale and zero point
    V_CODES: tl.constexpr = PAGE * D * BITS // 8
    V_PAGE: tl.constexpr = V_CODES + PAGE * D // CELL * WORD
    SHARED: tl.constexpr = 2 if BITS == 2 else 1  # channels of a byte
    ALL: tl.constexpr = EVEN and BITS != 2  # the channels are C0 + C1
    if EVEN:
        count = count // 32 * 32  # as it is, but the compiler sees that lines are aligned
        width = count // 32 * (32 // SHARED)
    else:
        width = (count + SHARED - 1) // SHARED
    k_codes = width * (PAGE if BITS == 8 else HALF)
    k_page = k_codes + PAGE // CELL * WORD * count
    k, v = bytes_base + tl.multiple_of(k_at, 16 if EVEN else 4), bytes_base + tl.multiple_of(v_at, 16)
    r0 = tl.arange(0, C0 // SHARED)
    q00 = _queries(q_row, ok, index, r0, width, ALL)
    q01 = _queries(q_row, ok, index, width + r0, count, ALL) if BITS == 2 else q00
    if C1 > 0:
        r1 = C0 // SHARED + tl.arange(0, C1 // SHARED)
        q10 = _queries(q_row, ok, index, r1, width, ALL)
        q11 = _queries(q_row, ok, index, width + r1, count, ALL) if BITS == 2 else q10
    p, token = tl.arange(0, PAGES), tl.arange(0, HALF)
    top = tl.full([PAGES, M], float("-inf"), tl.float32)  # m and z of every page's warp
    sums = tl.zeros([PAGES, M, HALF], tl.float32)
    a0 = tl.zeros([PAGES, M, W], tl.float32)
    a1, a2, a3 = a0, a0, a0
    for at in range(first, last, PAGES * PAGE):
        left = last - at - p * PAGE
        page = k + tl.multiple_of(at // PAGE * k_page, 16 if EVEN else 4)
        cells = (page + k_codes).to(tl.pointer_type(tl.int32), bitcast=True)
        ends = (page + k_codes).to(base.dtype, bitcast=True)
        s0 = _logits(q00, q01, page, cells, ends, left, r0, count, width, k_page, 0, EVEN, PAGE, BITS, CELL, PTX)
        s1 = _logits(q00, q01, page, cells, ends, left, r0, count, width, k_page, 1, EVEN, PAGE, BITS, CELL, PTX)
        if C1 > 0:
            s0 += _logits(q10, q11, page, cells, ends, left, r1, count, width, k_page, 0, EVEN, PAGE, BITS, CELL, PTX)
            s1 += _logits(q10, q11, page, cells, ends, left, r1, count, width, k_page, 1, EVEN, PAGE, BITS, CELL, PTX)
        s0 = tl.where(token[None, None, :] < left[:, None, None], s0 * scale, float("-inf"))
        s1 = tl.where(token[None, None, :] < left[:, None, None] - HALF, s1 * scale, float("-inf"))
        new = tl.maximum(top, tl.max(tl.maximum(s0, s1), 2))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)[:, :, None]
        p0, p1 = tl.exp2(s0 - safe[:, :, None]), tl.exp2(s1 - safe[:, :, None])
        sums = sums * alpha + (p0 + p1)
        top = new
        x0, x1 = p0.to(base.dtype.element_ty), p1.to(base.dtype.element_ty)
        page = v + tl.multiple_of(at // PAGE * V_PAGE, 16)
        cells = (page + V_CODES).to(tl.pointer_type(tl.int32), bitcast=True)
        ends = (page + V_CODES).to(base.dtype, bitcast=True)
        a0 = tl.dot(x0, _values(page, cells, ends, left, 0, 0, V_PAGE, D, PAGE, BITS, CELL, PTX), a0 * alpha)
        a1 = tl.dot(x0, _values(page, cells, ends, left, 0, 1, V_PAGE, D, PAGE, BITS, CELL, PTX), a1 * alpha)
        a2 = tl.dot(x0, _values(page, cells, ends, left, 0, 2, V_PAGE, D, PAGE, BITS, CELL, PTX), a2 * alpha)
        a3 = tl.dot(x0, _values(page, cells, ends, left, 0, 3, V_PAGE, D, PAGE, BITS, CELL, PTX), a3 * alpha)
        a0 = tl.dot(x1, _values(page, cells, ends, left, 1, 0, V_PAGE, D, PAGE, BITS, CELL, PTX), a0)
        a1 = tl.dot(x1, _values(page, cells, ends, left, 1, 1, V_PAGE, D, PAGE, BITS, CELL, PTX), a1)
        a2 = tl.dot(x1, _values(page, cells, ends, left, 1, 2, V_PAGE, D, PAGE, BITS, CELL, PTX), a2)
        a3 = tl.dot(x1, _values(page, cells, ends, left, 1, 3, V_PAGE, D, PAGE, BITS, CELL, PTX), a3)
    new = tl.maximum(m, tl.max(top, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    alpha, share = tl.exp2(m - safe), tl.exp2(top - safe[None, :])
    b0, b1 = tl.sum(a0 * share[:, :, None], 0), tl.sum(a1 * share[:, :, None], 0)
    b2, b3 = tl.sum(a2 * share[:, :, None], 0), tl.sum(a3 * share[:, :, None], 0)
    blocks = tl.join(tl.join(b0, b2), tl.join(b1, b3))  # [M, W, 2, 2], the last two in order b0 b1, b2 b3
    found = tl.reshape(tl.permute(blocks, (0, 2, 3, 1)), [M, D])
    total = tl.sum(tl.sum(sums, 2) * share, 0)
    return acc * alpha[:, None] + found, new, z * alpha[:, None] + total[:, None] / TILE
