"""Numbers of packed pages: codes and the scales of cells, as eval.cache.storage.quantised stores them, become numbers.

A byte is a bfloat16 number as it lies, and a number is one fused multiplication and addition away.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def scale_and_zero(cells, scales, number, there):
    """Scale and zero point [P, R] of the cells `number`, zero where not there.

    cells: address of cell 0's scale, as a pointer to words
    scales: the same address, as a pointer to the model's dtype

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
    """Numbers [P, R, N], times unit_of, of the codes in place PLACE of bytes [P, R, N].

    scale, zero: [P, R, 1] or [P, 1, N]
    """
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
