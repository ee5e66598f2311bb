"""The middle's part of the decode kernel where its numbers are packed (eval.cache.storage.quantised).

Every cell is read as it lies and dequantised in registers, to exactly the numbers that QuantisedSegment.read gives.

Names as in eval.cache.attention.kernel; a cell is CELL numbers of BITS bits, then scale and zero point.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eval.cache.attention.kernel_middle import gather, step

# fmt: off


@triton.jit
def _scale_and_zero(ends, cell, there, CODES: tl.constexpr, NUMBER: tl.constexpr):
    """Scale and zero point [R, G, 1] of cells [R, G], float32.

    Two halves of one word: loads of 4 bytes can be asked for tiles ahead, loads of 2 cannot.
    """
    if NUMBER == 2:
        words = ends.to(tl.pointer_type(tl.int32), bitcast=True)
        both = tl.load(words + cell * (CODES // 4 + 1) + CODES // 4, mask=there, other=0)
        if ends.dtype.element_ty == tl.bfloat16:  # the upper half of a float32
            scale = (both << 16).to(tl.float32, bitcast=True)
            zero = ((both >> 16) << 16).to(tl.float32, bitcast=True)
        else:
            scale = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            zero = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        end = ends + cell * (CODES // NUMBER + 2) + CODES // NUMBER
        scale = tl.load(end, mask=there, other=0.0)
        zero = tl.load(end + 1, mask=there, other=0.0)
    return scale[:, :, None], zero[:, :, None]


@triton.jit
def _numbers(codes, ends, cell, there, BITS: tl.constexpr, CELL: tl.constexpr):
    """Numbers [R, G * CELL] of the cells number `cell` [R, G], zero where not there [R, G].

    codes: bytes of cell 0
    ends: the same address as a pointer to the model's dtype
    """
    CODES: tl.constexpr = CELL * BITS // 8
    NUMBER: tl.constexpr = ends.dtype.element_ty.primitive_bitwidth // 8  # bytes
    at = cell[:, :, None] * (CODES + 2 * NUMBER) + tl.arange(0, CODES)[None, None, :]
    packed = tl.load(codes + at, mask=there[:, :, None], other=0)
    scale, zero = _scale_and_zero(ends, cell, there, CODES, NUMBER)
    if BITS == 4:
        x = tl.join((packed & 15).to(tl.float32) * scale + zero, (packed >> 4).to(tl.float32) * scale + zero)
    else:
        x0 = (packed & 3).to(tl.float32) * scale + zero
        x1 = ((packed >> 2) & 3).to(tl.float32) * scale + zero
        x2 = ((packed >> 4) & 3).to(tl.float32) * scale + zero
        x3 = (packed >> 6).to(tl.float32) * scale + zero
        x = tl.join(tl.join(x0, x2), tl.join(x1, x3))  # [R, G, CODES, 2, 2], the last two in order x0 x1, x2 x3
    return tl.reshape(x.to(ends.dtype.element_ty), [packed.shape[0], packed.shape[1] * CELL])


@triton.jit
def _keys(codes, ends, channel, count, at, last, TILE: tl.constexpr, PAGE: tl.constexpr,
          BITS: tl.constexpr, CELL: tl.constexpr):
    """K tile [C, TILE] of tokens at .. at + TILE - 1 of one head; cells at or past `last` are not read."""
    PER: tl.constexpr = PAGE // CELL  # cells of a channel in a page
    g = tl.arange(0, TILE // CELL)
    page = at // PAGE + g // PER
    cell = (page * count * PER + g % PER)[None, :] + channel[:, None] * PER
    there = (channel < count)[:, None] & (at + g * CELL < last)[None, :]
    return _numbers(codes, ends, cell, there, BITS, CELL)


@triton.jit
def packed_middle(
    acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    C0: tl.constexpr, C1: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr,
):
    """Tokens [first, last) of a packed part; the plain form is kernel_middle.middle.

    base, bytes_base: one address, from which the head's K and V begin k_at and v_at bytes on
    """
    NUMBER: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    k, v = bytes_base + tl.multiple_of(k_at, 4), bytes_base + tl.multiple_of(v_at, 4)  # cells are whole words
    k_ends, v_ends = base + k_at // NUMBER, base + v_at // NUMBER
    token, g = tl.arange(0, TILE), tl.arange(0, D // CELL)
    c0 = tl.arange(0, C0)
    q0 = gather(q_row, ok, index, c0, count, EVEN)
    if C1 > 0:
        c1 = C0 + tl.arange(0, C1)
        q1 = gather(q_row, ok, index, c1, count, EVEN)
    for at in range(first, last, TILE):
        s = tl.dot(q0, _keys(k, k_ends, c0, count, at, last, TILE, PAGE, BITS, CELL))
        if C1 > 0:
            s = tl.dot(q1, _keys(k, k_ends, c1, count, at, last, TILE, PAGE, BITS, CELL), s)
        there = token < last - at
        s = tl.where(there[None, :], s * scale, float("-inf"))
        cell = (at + token)[:, None] * (D // CELL) + g[None, :]
        values = _numbers(v, v_ends, cell, there[:, None] & (g >= 0)[None, :], BITS, CELL)
        acc, m, z = step(acc, m, z, s, values)
    return acc, m, z
