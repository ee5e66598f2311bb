"""What kernels over pages of codes share (eval.cache.storage.quantised): codes become numbers, and numbers codes.

A byte is a bfloat16 number as it lies, and a number is one fused multiplication and addition away.

A byte holds codes of different tiles of the products, so every tile of codes becomes an operand where it lies: no
number changes its thread between the load and the product. Every warp has a page, or half of one, of its own, [P, ...]
in all tiles: warps that shared it would unpack parts of it twice and wait for each other.

Values are multiplied as [channels, tokens] x [tokens, rows]: a product has at least 16 lines and 8 columns, and a tile
of one query token has 8 rows or fewer that count. So sums take half of the registers and instructions.

Names as in eval.cache.attention.kernels.parts. P is the number of warps, N that of columns. A half has HALF tokens; a
slab has D / 4 channels of V, which share a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leank import precision
from leank.eval.cache.attention.kernels.parts import gather

HALF = tl.constexpr(32)  # tokens of a page that are multiplied at a time
ROOM = tl.constexpr(precision.ROOM)
AT_ONCE = tl.constexpr(32)  # lines of channels: all at once took 254 registers, which left room for two programs


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
def word_scale_and_zero(word, UNIT: tl.constexpr):
    """Scale and zero point, float32, of packed words, int16; UNIT as for `packed_scale_and_zero`."""
    scale = (word & 0x7FC0).to(tl.float16, bitcast=True).to(tl.float32)
    steps = (word & 63).to(tl.float32)
    return scale, tl.where(word < 0, -steps, steps) * UNIT * scale


@triton.jit
def packed_scale_and_zero(words, number, there, dtype: tl.constexpr, UNIT: tl.constexpr):
    """Scale and zero point [P, R] of the packed words `number`, an even one first; see `quantised.quantise_packed`.

    words: address of word 0, as a pointer to pairs of words; UNIT: by what share of a scale zero points lie apart
    """
    word = (tl.load(words + number // 2, mask=there, other=0) >> number % 2 * 16).to(tl.int16)
    scale, zero = word_scale_and_zero(word, UNIT)
    return scale.to(dtype), zero.to(dtype)


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
