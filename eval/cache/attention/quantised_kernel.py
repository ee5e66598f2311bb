"""The middle's part of the decode kernel where its numbers are packed (eval.cache.storage.quantised).

A byte holds codes of different tiles of the products, so every tile of codes becomes an operand where it lies: no
number changes its thread between the load and the product. Every warp has a page, or half of one, of its own, [P, ...]
in all tiles: warps that shared it would unpack parts of it twice and wait for each other.

Values are multiplied as [channels, tokens] x [tokens, rows]: a product has at least 16 lines and 8 columns, and a tile
of one query token has 8 rows or fewer that count. So sums take half of the registers and instructions.

Names as in eval.cache.attention.kernel. P is the number of warps, N that of columns. A half has HALF tokens; a block
has D / 4 channels of V, which share a cell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank.eval.cache.attention.kernel_middle import gather
from leank.eval.cache.attention.unpacking_kernel import numbers, scale_and_zero, unit_of
from leank.eval.cache.storage import quantised

HALF = tl.constexpr(32)  # tokens of a page that are multiplied at a time
ROOM = tl.constexpr(quantised.ROOM)

# fmt: off


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
    q0, q1, page, cells, scales, number, half, left, row, room, width, k_page, PLACE: tl.constexpr,
    BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
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
    NUMBER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    start = number * k_page
    line = _tokens()
    at = (start + (half * HALF * width if BITS == 8 else 0))[:, None, None]
    at = at + (line * width)[None, None, :] + row[None, :, None]
    there = (left > 0)[:, None] & (row < width)[None, :]
    codes = tl.load(page + at, mask=there[:, :, None], other=0)
    cell = (start // (2 * NUMBER) + half * HALF // CELL * room)[:, None] + row[None, :]
    scale, zero = scale_and_zero(cells, scales, cell, there)
    s = tl.dot(q0, numbers(codes, scale[:, :, None], zero[:, :, None], PLACE, BITS, PTX))
    if BITS == 2:
        scale, zero = scale_and_zero(cells, scales, cell + width, there)
        s = tl.dot(q1, numbers(codes, scale[:, :, None], zero[:, :, None], PLACE + 1, BITS, PTX), s)
    return s


@triton.jit
def _values(
    page, cells, scales, number, half, left, BLOCK: tl.constexpr, V_PAGE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
):
    """Values of halves of pages in block BLOCK, [P, D / 4, HALF], for the tokens before `left` [P] of a half.

    Later ones are zero, except the second token of a pair. That one has some number, since its group is stored whole,
    and its weight is zero.
    """
    W: tl.constexpr = D // 4
    LINES: tl.constexpr = BITS // 2  # blocks / codes of a byte
    NUMBER: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    t = tl.arange(0, HALF)
    channel = BLOCK % LINES * W + tl.arange(0, W)
    start = number * V_PAGE
    at = (start + half * HALF)[:, None, None] + (channel * PAGE)[None, :, None] + t[None, None, :]
    codes = tl.load(page + at, mask=(left > 0)[:, None, None], other=0)
    cell = (start // (2 * NUMBER) + half * HALF)[:, None] + (BLOCK * W // CELL * PAGE + t)[None, :]
    scale, zero = scale_and_zero(cells, scales, cell, (t // 2 * 2)[None, :] < left[:, None])
    return numbers(codes, scale[:, None, :], zero[:, None, :], BLOCK // LINES, BITS, PTX)


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
    a0, a1, a2, a3, p, page, number, half, left,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
    dtype: tl.constexpr,
):
    """Add values times weights p [P, N, HALF] to every block's sum, [P, D / 4, N]."""
    V_CODES: tl.constexpr = PAGE * D * BITS // 8
    V_PAGE: tl.constexpr = V_CODES + PAGE * D // CELL * 2 * dtype.primitive_bitwidth // 8
    cells = (page + V_CODES).to(tl.pointer_type(tl.int32), bitcast=True)
    scales = (page + V_CODES).to(tl.pointer_type(dtype), bitcast=True)
    x = _in_order(p.to(dtype))
    a0 = tl.dot(_values(page, cells, scales, number, half, left, 0, V_PAGE, D, PAGE, BITS, CELL, PTX), x, a0)
    a1 = tl.dot(_values(page, cells, scales, number, half, left, 1, V_PAGE, D, PAGE, BITS, CELL, PTX), x, a1)
    a2 = tl.dot(_values(page, cells, scales, number, half, left, 2, V_PAGE, D, PAGE, BITS, CELL, PTX), x, a2)
    a3 = tl.dot(_values(page, cells, scales, number, half, left, 3, V_PAGE, D, PAGE, BITS, CELL, PTX), x, a3)
    return a0, a1, a2, a3


@triton.jit
def _summed(x):
    """Sums [A, B, 2, 2] of x [P, A, B, 2, 2] over warps.

    Halves are added, because what tl.sum exchanges between warps would lie in one bank of shared memory.
    """
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
    """The softmax so far, acc, m and z, with that of all warps.

    a0 to a3: [P, D / 4, N], top: [P, N], sums: [P, N, HALF]
    """
    M: tl.constexpr = acc.shape[0]
    most = tl.max(top, 0)
    share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most)[None, :])
    total = tl.sum(tl.sum(sums, 2) * share, 0)
    share = share[:, None, :] * (1.0 / UNIT)
    blocks = _summed(tl.join(tl.join(a0 * share, a2 * share), tl.join(a1 * share, a3 * share)))
    # [D / 4, N, 2, 2], the last two in order a0 a1, a2 a3
    found = tl.reshape(tl.permute(blocks, (1, 2, 3, 0)), [top.shape[1], acc.shape[1]])
    most, total, found = _wider(most, float("-inf"), M), _wider(total, 0.0, M), _wider(found, 0.0, M)
    new = tl.maximum(m, most)
    safe = tl.where(new == float("-inf"), 0.0, new)
    before, now = tl.exp2(m - safe), tl.exp2(most - safe)
    return acc * before[:, None] + found * now[:, None], new, z * before[:, None] + (total * now)[:, None] / TILE


@triton.jit
def _sums(
    q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    C: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Every warp's softmax of tokens [first, last) of a packed part with up to C channels, as `_together` takes it.

    base, bytes_base: one address, from which the head's K and V begin k_at and v_at bytes on
    N: 8 where the tile has no more rows that count, else M
    PTX: whether the target is a GPU, which Triton's interpreter is not
    """
    dtype: tl.constexpr = base.dtype.element_ty
    WORD: tl.constexpr = 2 * dtype.primitive_bitwidth // 8  # bytes of scale and zero point
    V_PAGE: tl.constexpr = PAGE * D * BITS // 8 + PAGE * D // CELL * WORD
    SHARED: tl.constexpr = 2 if BITS == 2 else 1  # channels of a byte
    PARTS: tl.constexpr = 1 if BITS == 8 else 2  # halves that a warp reads at a time: those that share bytes of K
    UNIT: tl.constexpr = unit_of(dtype, PTX)
    if EVEN:
        count = count // 32 * 32  # as it is, but the compiler sees that lines are aligned
        room, width = count, count // 32 * (32 // SHARED)
    else:
        lots = (count + ROOM - 1) // ROOM
        room, width = lots * ROOM, lots * (ROOM // SHARED)
    k_codes = width * (PAGE if BITS == 8 else HALF)
    k_page = k_codes + PAGE // CELL * WORD * room
    k, v = tl.multiple_of(bytes_base + k_at, 16), tl.multiple_of(bytes_base + v_at, 16)
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
        scales = (page + k_codes).to(base.dtype, bitcast=True)
        s = _logits(q0, q1, page, cells, scales, number, half, left, row, room, width, k_page, 0, BITS, CELL, PTX)
        s = _masked(s, token, left, N)
        new = tl.max(s, 2)
        if PARTS == 2:
            t = _logits(q0, q1, page, cells, scales, number, half + 1, left, row, room, width, k_page, 4 // BITS,
                        BITS, CELL, PTX)
            t = _masked(t, token, left - HALF, N)
            new = tl.maximum(new, tl.max(t, 2))
        new = tl.maximum(top, new * scale)
        safe = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp2(top - safe)
        top = new
        p = tl.exp2(s * scale - safe[:, :, None])
        sums = sums * alpha[:, :, None] + p
        alpha = alpha[:, None, :]
        page = v + tl.multiple_of(at // PAGE * V_PAGE, 16)
        a0, a1, a2, a3 = _add(a0 * alpha, a1 * alpha, a2 * alpha, a3 * alpha, p, page, number, half, left,
                              D, PAGE, BITS, CELL, PTX, dtype)
        if PARTS == 2:
            p = tl.exp2(t * scale - safe[:, :, None])
            sums += p
            a0, a1, a2, a3 = _add(a0, a1, a2, a3, p, page, number, half + 1, left - HALF,
                                  D, PAGE, BITS, CELL, PTX, dtype)
    return a0, a1, a2, a3, top, sums


@triton.jit
def packed_middle(
    acc, m, z, q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
    ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    EVEN: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, CELL: tl.constexpr, PTX: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Tokens [first, last) of a packed part; the plain form is kernel_middle.middle.

    An operand has at least 32 bytes of channels, which at two bits are 64.
    """
    N: tl.constexpr = 8 if ROWS <= 8 and acc.shape[0] == 16 else acc.shape[0]
    if count <= 32 and BITS > 2:
        a0, a1, a2, a3, top, sums = _sums(
            q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
            32 if BITS > 2 else 64, N, D, EVEN, PAGE, BITS, CELL, PTX, WARPS)
    elif count <= 64 or D == 64:
        a0, a1, a2, a3, top, sums = _sums(
            q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
            64, N, D, EVEN, PAGE, BITS, CELL, PTX, WARPS)
    else:
        a0, a1, a2, a3, top, sums = _sums(
            q_row, ok, index, base, bytes_base, k_at, v_at, first, last, count, scale,
            128, N, D, EVEN, PAGE, BITS, CELL, PTX, WARPS)
    return _together(acc, m, z, a0, a1, a2, a3, top, sums, TILE, unit_of(base.dtype.element_ty, PTX))
