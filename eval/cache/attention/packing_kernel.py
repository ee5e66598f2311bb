"""Tokens that leave the window for a packed middle: the fast form of Store.move over eval.cache.storage.quantised.

The bytes are exactly those that QuantisedSegment.append writes. Names as in eval.cache.attention.quantised_kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention.quantised_kernel import HALF, ROOM

AT_ONCE = tl.constexpr(32)  # lines of channels: all at once took 254 registers, which left room for two programs

# fmt: off


@triton.jit
def _scale(low, high, BITS: tl.constexpr):
    """(max - min) / (2^bits - 1), rounded to the model's dtype."""
    return tl.div_rn(high.to(tl.float32) - low.to(tl.float32), 2**BITS - 1.0).to(low.dtype)


@triton.jit
def _codes(x, scale, low, BITS: tl.constexpr):
    """Codes of numbers x, in int32; scale and low have its shape."""
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    code = tl.div_rn(x.to(tl.float32) - low.to(tl.float32), step)
    code = (code + 12582912.0) - 12582912.0  # to the nearest whole number, of two that are as near the even one
    return tl.minimum(code, 2**BITS - 1.0).to(tl.int32)


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
    scale = _scale(low, high, BITS)
    code = _codes(x, scale[None, :], low[None, :], BITS)
    if BITS == 8:
        at = (half * HALF + t)[:, None] * width + row[None, :]
        tl.store(page + at, code.to(tl.uint8), mask=there[None, :])
        if CELL > HALF:
            code = _codes(y, scale[None, :], low[None, :], BITS)
            tl.store(page + at + HALF * width, code.to(tl.uint8), mask=there[None, :])
    else:
        at = t[:, None] * width + row[None, :]
        code = code << (BEGIN * 2 + half * 4)
        if CELL > HALF:
            code |= _codes(y, scale[None, :], low[None, :], BITS) << (BEGIN * 2 + 4)
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
            scale = _scale(low, high, BITS)
            x = whole
            if WIDTH < CELL:
                x = tl.load(ring + slot[:, None] * D + (place * LINES + line + d)[None, :]).to(tl.float32)
            code |= _codes(x, scale[:, None], low[:, None], BITS) << (place * BITS)
            at = first // CELL * PAGE + token
            at = at // 2 * 4 + at % 2
            tl.store(scales + at, scale)
            tl.store(scales + at + 2, low)
        tl.store(page + (line + d)[None, :] * PAGE + token[:, None], code.to(tl.uint8))


@triton.jit
def move_packed(
    ring_k, ring_v, k, v, index, places, seen_ptr, start_ptr, length_ptr, done,
    index_b, slots, window, flush,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr,
):
    """Program (b, h): pack the tokens due of row b's window, whole cells, behind those that head h holds.

    The parameters are those of `ring_kernel.move`; k, v and places count bytes.
    """
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
