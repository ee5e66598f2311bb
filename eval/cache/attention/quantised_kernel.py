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
    upper, fma, exact = 0, "fma.rn.bf16x2", ""
    if str(dtype) == "fp16":
        one, less = 0x3C00 - (first << 10), 0xE400 - (first << 10)  # 2^-first and -1024 * 2^-first
        upper, fma = 0x64, "fma.rn.f16x2"
        exact = f"""mov.b32 one, {one * 0x10001}; mov.b32 less, {less * 0x10001};
        {fma} a, a, one, less; {fma} b, b, one, less;"""
    return f"""{{ .reg .b32 c, a, b, one, less;
        and.b32 c, $2, {keep};
        prmt.b32 a, c, {upper}, 0x4140; prmt.b32 b, c, {upper}, 0x4342;
        {exact}
        {fma} $0, a, $3, $5; {fma} $1, b, $4, $6; }}"""


@triton.jit
def _ends(cells, ends, number, there):
    """Scale and zero point [P, R] of the cells `number`, zero where not there.

    cells: address of cell 0's scale, as a pointer to words
    ends: the same address, as a pointer to the model's dtype

    Two scales, or two zero points, are a word: loads of 4 bytes can be asked for tiles ahead, loads of 2 cannot. So
    both of a pair are there, or neither.
    """
    dtype: tl.constexpr = ends.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        words = tl.load(cells + number, mask=there, other=0)
        P: tl.constexpr = number.shape[0]
        R: tl.constexpr = number.shape[1]
        scales, zeros = tl.split(tl.reshape(words, [P, R // 2, 2]))
        scale = tl.reshape(tl.join(scales.to(tl.int16), (scales >> 16).to(tl.int16)), [P, R]).to(dtype, bitcast=True)
        zero = tl.reshape(tl.join(zeros.to(tl.int16), (zeros >> 16).to(tl.int16)), [P, R]).to(dtype, bitcast=True)
    else:
        at = number // 2 * 4 + number % 2
        scale = tl.load(ends + at, mask=there, other=0.0)
        zero = tl.load(ends + at + 2, mask=there, other=0.0)
    return scale, zero


@triton.jit
def numbers(codes, scale, zero, PLACE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Numbers [P, R, N], times unit_of, of the codes in place PLACE of bytes [P, R, N]; scale and zero point [P, R]."""
    dtype: tl.constexpr = scale.dtype
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    if PTX:
        if UNIT != 1.0:  # Triton would round a small Python number beside bfloat16 as if to float16, to 0
            scale *= tl.full([], UNIT / step_of(dtype, BITS, PLACE), tl.float32).to(dtype)
            zero *= tl.full([], UNIT, tl.float32).to(dtype)
        x = tl.inline_asm_elementwise(
            instructions(dtype, BITS, PLACE), "=r,=r,r,r,r,r,r", [codes, scale[:, :, None], zero[:, :, None]],
            dtype=scale.dtype, is_pure=True, pack=4)
    else:
        code = ((codes >> (PLACE * BITS)) & (2**BITS - 1)).to(tl.float32)
        x = ((code * scale.to(tl.float32)[:, :, None] + zero.to(tl.float32)[:, :, None]) * UNIT).to(dtype)
    return x


@triton.jit
def _tokens():
    """The tokens of a half in the order of its logits, [HALF]: a thread has those that it multiplies by values."""
    j = tl.arange(0, HALF)
    return j % 8 // 2 * 8 + j // 8 * 2 + j % 2


@triton.jit
def _in_order(x):
    """Columns [P, M, HALF] in the order of _tokens, back in the order of tokens."""
    P: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [P, M, 4, 4, 2]), (0, 1, 3, 2, 4)), [P, M, HALF])


@triton.jit
def _logits(
    q0, q1, page, cells, ends, left, row, room, width, k_page, PART: tl.constexpr,
    BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Half PART of the logits of pages, [P, M, HALF].

    q0, q1: queries [P, M, R] for the channels row, and at two bits, for those half of the head's channels later
    page: address of the first page
    row: [R], columns of a page's bytes
    left: [P], tokens from a page's first to the last one
    room, width, k_page: channels for which there is room, bytes of a line of codes, bytes of a page
    """
    NUMBER: tl.constexpr = ends.dtype.element_ty.primitive_bitwidth // 8
    p = tl.arange(0, PAGES)
    line = _tokens() + (PART * HALF if BITS == 8 else 0)
    at = (p * k_page)[:, None, None] + (line * width)[None, None, :] + row[None, :, None]
    there = (left > 0)[:, None] & (row < width)[None, :]
    codes = tl.load(page + at, mask=there[:, :, None], other=0)
    number = (p * (k_page // (2 * NUMBER)))[:, None] + (row + room * (PART * HALF // CELL))[None, :]
    scale, zero = _ends(cells, ends, number, there)
    s = tl.dot(q0, numbers(codes, scale, zero, 2 * PART if BITS == 2 else PART if BITS == 4 else 0, BITS, PTX))
    if BITS == 2:
        scale, zero = _ends(cells, ends, number + width, there)
        s = tl.dot(q1, numbers(codes, scale, zero, 2 * PART + 1, BITS, PTX), s)
    return s


@triton.jit
def _values(
    page, cells, ends, left, PART: tl.constexpr, BLOCK: tl.constexpr, V_PAGE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Half PART of the values of pages in block BLOCK, [P, HALF, D / 4], for the tokens before `left` [P] of a page.

    Later ones are zero, except the second token of a pair. That one has some number, since its group is stored whole,
    and its weight is zero.
    """
    W: tl.constexpr = D // 4
    LINES: tl.constexpr = BITS // 2  # blocks / codes of a byte
    NUMBER: tl.constexpr = ends.dtype.element_ty.primitive_bitwidth // 8
    p, t = tl.arange(0, PAGES), tl.arange(0, HALF) + PART * HALF
    channel = BLOCK % LINES * W + tl.arange(0, W)
    at = (p * V_PAGE)[:, None, None] + (channel * PAGE)[None, None, :] + t[None, :, None]
    codes = tl.load(page + at, mask=(left > 0)[:, None, None], other=0)
    number = (p * (V_PAGE // (2 * NUMBER)))[:, None] + (BLOCK * W // CELL * PAGE + t)[None, :]
    scale, zero = _ends(cells, ends, number, (t // 2 * 2)[None, :] < left[:, None])
    return numbers(codes, scale, zero, BLOCK // LINES, BITS, PTX)


@triton.jit
def _queries(q_row, ok, index, channel, count):
    """Query channels for every page, [P, M, C]; zero from channel `count` on."""
    q = gather(q_row, ok, index, channel, count, False)
    return tl.broadcast_to(q[None, :, :], [PAGES, q.shape[0], q.shape[1]])


@triton.jit
def _middle(
    acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    C: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Tokens [first, last) of a packed part with up to C channels.

    base, bytes_base: one address, from which the head's K and V begin k_at and v_at bytes on
    PTX: whether the target is a GPU, which Triton's interpreter is not
    """
    M: tl.constexpr = acc.shape[0]
    W: tl.constexpr = D // 4
    WORD: tl.constexpr = 2 * base.dtype.element_ty.primitive_bitwidth // 8  # bytes of scale and zero point
    V_CODES: tl.constexpr = PAGE * D * BITS // 8
    V_PAGE: tl.constexpr = V_CODES + PAGE * D // CELL * WORD
    SHARED: tl.constexpr = 2 if BITS == 2 else 1  # channels of a byte
    if EVEN:
        count = count // 32 * 32  # as it is, but the compiler sees that lines are aligned
        width = count // 32 * (32 // SHARED)
        room = count
    else:
        room = (count + 2 * SHARED - 1) // (2 * SHARED) * (2 * SHARED)
        width = room // SHARED
    k_codes = width * (PAGE if BITS == 8 else HALF)
    k_page = k_codes + PAGE // CELL * WORD * room
    k, v = bytes_base + tl.multiple_of(k_at, 16 if EVEN else 4), bytes_base + tl.multiple_of(v_at, 16)
    row = tl.arange(0, C // SHARED)
    q0 = _queries(q_row, ok, index, row, tl.minimum(width, count))
    q1 = _queries(q_row, ok, index, width + row, count) if BITS == 2 else q0
    p, token = tl.arange(0, PAGES), _tokens()
    UNIT: tl.constexpr = unit_of(base.dtype.element_ty, PTX)
    scale *= 1.0 / UNIT
    top = tl.full([PAGES, M], float("-inf"), tl.float32)  # m and z of every page's warp
    sums = tl.zeros([PAGES, M, HALF], tl.float32)
    a0 = tl.zeros([PAGES, M, W], tl.float32)
    a1, a2, a3 = a0, a0, a0
    for at in range(first, last, PAGES * PAGE):
        left = last - at - p * PAGE
        page = k + tl.multiple_of(at // PAGE * k_page, 16 if EVEN else 4)
        cells = (page + k_codes).to(tl.pointer_type(tl.int32), bitcast=True)
        ends = (page + k_codes).to(base.dtype, bitcast=True)
        s0 = _logits(q0, q1, page, cells, ends, left, row, room, width, k_page, 0, BITS, CELL, PTX)
        s1 = _logits(q0, q1, page, cells, ends, left, row, room, width, k_page, 1, BITS, CELL, PTX)
        s0 = tl.where(token[None, None, :] < left[:, None, None], s0 * scale, float("-inf"))
        s1 = tl.where(token[None, None, :] < left[:, None, None] - HALF, s1 * scale, float("-inf"))
        new = tl.maximum(top, tl.max(tl.maximum(s0, s1), 2))
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)[:, :, None]
        p0, p1 = tl.exp2(s0 - safe[:, :, None]), tl.exp2(s1 - safe[:, :, None])
        sums = sums * alpha + (p0 + p1)
        top = new
        x0, x1 = _in_order(p0.to(base.dtype.element_ty)), _in_order(p1.to(base.dtype.element_ty))
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
    of_page = share[:, :, None] * (1.0 / UNIT)
    b0, b1, b2, b3 = tl.sum(a0 * of_page, 0), tl.sum(a1 * of_page, 0), tl.sum(a2 * of_page, 0), tl.sum(a3 * of_page, 0)
    blocks = tl.join(tl.join(b0, b2), tl.join(b1, b3))  # [M, W, 2, 2], the last two in order b0 b1, b2 b3
    found = tl.reshape(tl.permute(blocks, (0, 2, 3, 1)), [M, D])
    total = tl.sum(tl.sum(sums, 2) * share, 0)
    return acc * alpha[:, None] + found, new, z * alpha[:, None] + total[:, None] / TILE


@triton.jit
def packed_middle(
    acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Tokens [first, last) of a packed part; the plain form is kernel_middle.middle.

    An operand has at least 32 bytes of channels, which at two bits are 64.
    """
    if count <= 64:
        acc, m, z = _middle(acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
                            64, TILE, D, EVEN, PAGE, BITS, CELL, PTX)
    elif D > 64:
        acc, m, z = _middle(acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
                            128, TILE, D, EVEN, PAGE, BITS, CELL, PTX)
    return acc, m, z
