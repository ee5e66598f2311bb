"""Compile the cache's kernels for a GPU on a machine without one: `python -m tests.helpers.compiling 64`.

Triton's interpreter runs Python, and so accepts what the compiler refuses. It must be off, hence a process of its own.
The number is head_dim. At 128 the loops over channels are there twice and are longer, which takes much more time.
Versions of Triton refuse different things, so that of each PyTorch for GPUs counts: 2.11 brings 3.6. Another one is put
before the installed one by `pip install --no-deps --target FOLDER triton==3.6.0` and PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from leank.eval.cache.attention import work
from leank.eval.cache.attention.kernels import banded, choose, decode, evict, packed, ring
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.methods.kernels import rkv as rkv_kernel
from leank.eval.methods.kernels.rkv import UNIT as WHOLE
from leank.eval.serving.kernels import paged

UNIT = -64  # log2 of kernels.packed.unit_of in bfloat16
SUBNORMAL = -133  # log2 of bfloat16's smallest number, which a byte counts
HOPPER = GPUTarget("cuda", 90, 32)
NUMBER, COUNT, TABLE, BYTES, FLOATS = "*bf16", "*i64", "*i32", "*u8", "*fp32"
OF_DECODE = {
    "layer": Layer(NUMBER, BYTES, TABLE, TABLE, COUNT, COUNT, COUNT, *["i32"] * 4), "table": COUNT,
    "queries": Queries(NUMBER, COUNT, *["i32"] * 4, "fp32"), "results": Results(NUMBER, FLOATS, FLOATS, TABLE),
    "scratch": COUNT, "room": COUNT,
}  # fmt: skip
OF_MOVE = {
    "ring_k": NUMBER, "ring_v": NUMBER, "k": NUMBER, "v": NUMBER, "index": TABLE, "ranks": TABLE, "places": COUNT,
    "seen_ptr": COUNT, "start_ptr": COUNT, "length_ptr": COUNT, "done": TABLE,
}  # fmt: skip
OF_COMPACT = {
    "k": NUMBER, "v": NUMBER, "new_k": NUMBER, "new_v": NUMBER, "places": COUNT, "new_places": COUNT, "stay": BYTES,
    "source": TABLE, "room": COUNT, "seen_ptr": COUNT, "start_ptr": COUNT, "length_ptr": COUNT,
}  # fmt: skip
OF_RKV = {
    "k": NUMBER, "places": COUNT, "length_ptr": COUNT, "norm": FLOATS, "repeated": COUNT, "total": FLOATS,
    "scores": FLOATS, "ranked": FLOATS, "threshold": "fp32", "mix": "fp32",
}  # fmt: skip
OF_CHOSEN = {
    **OF_DECODE, "base": NUMBER, "words": FLOATS, "q": NUMBER, "index": TABLE, "tail_ptr": COUNT, "chosen": TABLE,
}  # fmt: skip
HEADS = {"H": 8}
FORM = decode.Form(
    H=8, GROUP=4, D=64, TILE=64, M=16, ROWS=4, MERGE_LINES=32, EVEN=True, PAGE=64, FIELDS=work.FIELDS, WARPS=4,
    VALUES=0, WEIGHTS=False, PDL=True,
)  # fmt: skip
MOVE = {**HEADS, "TILE": 32, "PAGE": 64, "VALUES": 0}
CHOSEN = {
    **HEADS, "GROUP": 4, "TILE": 16, "SPAN": 64, "M": 16, "ROWS": 4, "MERGE_LINES": 32, "PER": 16, "STEP": 16,
}  # fmt: skip
SCORED = {**HEADS, "GROUP": 4, "M": 16, "TILE": 64, "RUN": 8, "C": 16, "STEP": 16}
CHOICE = {"GROUP": 4, "RUN": 8, "WIDTH": 10, "LINES": 64, "LAST": 64}


def compiles(function: triton.JITFunction, types: Mapping[str, object], constants: Mapping[str, object]) -> str:
    """Compile a kernel; parameters that are neither in `types` nor in `constants` are 32-bit integers.

    Returns Triton's first form of it, in which numbers are still decimal. Raises what Triton raises.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()})
    return str(triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": 2}).asm["ttir"])


def powers(text: str, dtype: str) -> set[float]:
    """Return log2 of the positive constants of a dtype, whole where they are powers of two; six digits are printed."""
    found = re.findall(rf"arith\.constant (?:dense<)?([\d.]+[eE][+-]\d+)>? : (?:tensor<[x\d]+x)?{dtype}\b", text)
    return {round(math.log2(float(one)), 4) for one in found if float(one)}


def wrong_units(text: str, bits: int) -> str:
    """Say which constant of a packed middle in bfloat16 is not the power of two that it must be; "" if all are.

    Zero points are multiplied by the unit, scales by the unit over the number that code 1 has in its place of a byte,
    and logits and results by 1 / unit in float32.
    """
    must = {UNIT, *(UNIT - SUBNORMAL - place * bits for place in range(8 // bits))}
    there = powers(text, "bf16") - {0}
    if must != there:
        return f"{bits} bits: log2 of the constants in bfloat16 is {sorted(there)}, not {sorted(must)}"
    found = {one for one in powers(text, "f32") if one > 32}
    return "" if found == {-UNIT} else f"{bits} bits: log2 of the large constants in float32 is {found}, not {-UNIT}"


def main(dim: int) -> None:
    """Compile the forms that differ in what a constant switches on, at one head_dim."""
    form, move = FORM._replace(D=dim), {**MOVE, "D": dim}
    for change in ({"VALUES": dim // 2}, {"WEIGHTS": True}):
        compiles(decode.decode, OF_DECODE, {"F": form._replace(**change), "READ": None, "CODES": None})
    for bits in (8, 2):
        codec = {"READ": packed.read, "CODES": packed.Codes(bits, 32, True)}
        text = compiles(decode.decode, OF_DECODE, {"F": form, **codec})
        assert not (wrong := wrong_units(text, bits)), f"{wrong}; Triton may have made 0 of one"
    for change in ({}, {"VALUES": 1}, {"PAGE": 1}):
        compiles(ring.move, OF_MOVE, {**move, **change})
    page = {**HEADS, "D": dim, "PAGE": 64}
    compiles(evict.drop, OF_COMPACT, {**HEADS, "TILE": 256})
    compiles(evict.compact, OF_COMPACT, {"D": dim, "PAGE": 64, "SLICE": 64})
    keys = {**page, "TILE": 64}
    compiles(rkv_kernel.measure, OF_RKV, keys)
    compiles(rkv_kernel.rank, OF_RKV, {**keys, "KERNEL": 7, "UNIT": WHOLE})
    for change in ({}, {"PAGE": 0}):
        compiles(rkv_kernel.repeats, OF_RKV, {**keys, "BLOCK": 64, "SPAN": 1024, "UNIT": WHOLE, **change})
    compiles(choose.attend, OF_CHOSEN, {**CHOSEN, "D": dim, "C": dim})
    for bits, label_step in ((16, 8), (4, 16)):
        labels = {**SCORED, "D": dim, "LABEL_STEP": label_step, "BITS": bits}
        compiles(choose.score_tokens, OF_CHOSEN, labels)
    for change in ({"PER": 1, "CAP": 64}, {"PER": 16, "CAP": 0}):
        compiles(choose.choose, OF_CHOSEN, {**CHOICE, **change})
    group = paged.Group(TABLE, TABLE, TABLE, "i32", "i32")
    of_pages = {
        "pages": NUMBER, "q": NUMBER, "out": NUMBER, "lengths": TABLE, "kept": group, "rest": group, "part": FLOATS,
        "stat": FLOATS, "done": TABLE, "scale": "fp32",
    }  # fmt: skip
    for even, block in ((True, 64), (False, 16)):
        compiles(paged.decode, of_pages, {"F": paged.Form(8, 4, dim, 8, 8, 64, 24, even, 16, 4, 16, block, block)})
    mixed = banded.Codes(((16, 32, 64, 64, 4), (0, 0, 0, 64, 3), (48, 0, 0, 0, 16)), (9000,) * 3, 104000, True)
    text = compiles(decode.decode, OF_DECODE, {"F": form, "READ": banded.read, "CODES": mixed})
    assert not (wrong := wrong_units(text, 2)), f"{wrong}; Triton may have made 0 of one"
    of_packed = {name: kind for name, kind in OF_MOVE.items() if name != "ranks"} | {"k": BYTES, "v": BYTES}
    compiles(packed.move, of_packed, {**page, "BITS": 2, "CELL": 32})
    compiles(banded.move, of_packed | {"bands": TABLE}, page)


if __name__ == "__main__":
    main(int(sys.argv[1]))
