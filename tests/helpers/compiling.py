"""Compile the cache's kernels for a GPU on a machine without one: `python -m tests.helpers.compiling 64`.

Triton's interpreter runs Python, and so accepts what the compiler refuses. It must be off, hence a process of its own.
The number is head_dim, of those that the kernels have. The more channels, the more loops over them there are, and the
longer each takes to compile. Of the decode kernel it prints a thread's registers and the bytes that it spills, and a
program's shared memory, as it is launched; for compute capability 9.0, or another: `python -m tests.helpers.compiling
256 80`.

Versions of Triton refuse different things, so that of each PyTorch for GPUs counts: 2.11 brings 3.6. Another one is put
before the installed one by `pip install --no-deps --target FOLDER triton==3.6.0` and PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from tempfile import NamedTemporaryFile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from leank.eval.cache.attention.kernels import HEAD_DIMS, banded, choose, decode, evict, ring
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.attention.launch import Kernel, moved
from leank.eval.cache.attention.readers import Config
from leank.eval.methods.kernels import rkv as rkv_kernel
from leank.eval.methods.kernels.rkv import UNIT as WHOLE
from leank.eval.serving.kernels import coded, paged, schedule

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
OF_CODES = {
    **dict.fromkeys(("pages", "k", "v", "ring_k", "ring_v", "full_k", "full_v", "few_k", "few_v"), NUMBER),
    **dict.fromkeys(("plan", "lengths", "kept_table", "rest_table", "stripes", "index", "bands", "place"), TABLE),
    "codes": BYTES, "rest_stripes": TABLE, "slots": COUNT,
}  # fmt: skip
HEADS = {"H": 8}
FORM = decode.Form(
    H=8, GROUP=4, D=64, TILE=64, M=16, ROWS=4, MERGE_LINES=32, EVEN=True, PAGE=64, WARPS=4,
    VALUES=0, WEIGHTS=False, PDL=True,
)  # fmt: skip
MOVE = {**HEADS, "TILE": 32, "PAGE": 64, "VALUES": 0}
CHOSEN = {
    **HEADS, "GROUP": 4, "TILE": 16, "SPAN": 64, "M": 16, "ROWS": 4, "MERGE_LINES": 32, "PER": 16, "STEP": 16,
}  # fmt: skip
SCORED = {**HEADS, "GROUP": 4, "M": 16, "TILE": 64, "RUN": 8, "C": 16, "STEP": 16}
CHOICE = {"GROUP": 4, "RUN": 8, "WIDTH": 10, "LINES": 64, "LAST": 64}


def made(
    function: triton.JITFunction,
    types: Mapping[str, object],
    constants: Mapping[str, object],
    warps: int = 4,
    stages: int = 2,
    target: GPUTarget = HOPPER,
) -> CompiledKernel:
    """Compile a kernel; parameters that are neither in `types` nor in `constants` are 32-bit integers.

    Pointers and strides are multiples of 16, as they are in a cache. Raises what Triton raises.
    """
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = [place for i, name in enumerate(names) for place in _aligned((i,), signature[name])]
    aligned = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def _aligned(path: tuple[int, ...], kind: object, name: str = "") -> Iterator[tuple[int, ...]]:
    """The places of pointers and strides in a parameter, which may be a tuple with names."""
    if isinstance(kind, tuple):
        for i, (field, of_field) in enumerate(zip(kind._fields, kind, strict=True)):  # type: ignore[attr-defined]
            yield from _aligned((*path, i), of_field, field)
    elif str(kind).startswith("*") or name.endswith(("_b", "_h", "_t")):
        yield path


def compiles(function: triton.JITFunction, types: Mapping[str, object], constants: Mapping[str, object]) -> str:
    """Compile a kernel, and return Triton's first form of it, in which numbers are still decimal; see `made`."""
    return str(made(function, types, constants).asm["ttir"])


def resources(kernel: CompiledKernel) -> tuple[int, int, int]:
    """Return registers and bytes spilled of a thread, and bytes of a program's shared memory."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        line = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return registers, stack, kernel.metadata.shared


def forms_of(dim: int) -> Iterator[tuple[str, decode.Form, Config]]:
    """Yield the forms of the decode kernel over 16 bits at one head_dim: names, what it is compiled for, its launch."""
    group: dict[str, int] = {"ROWS": 4}
    changes = {
        "group of 4": group,
        "counts of any size": {**group, "EVEN": False},
        "evicts": {**group, "WEIGHTS": True},
        "pruned V": {**group, "VALUES": triton.next_power_of_2(dim)},
        **({"32 rows": {"M": 32, "ROWS": 32}} if dim <= 128 else {"group of 16": {"GROUP": 16, "ROWS": 16}}),
    }
    for name, change in changes.items():
        form = FORM._replace(D=dim, **change)
        config = Kernel()._config(None, dim, form.M)
        merged = max(1, config.merge // max(form.ROWS, config.warps))
        yield name, form._replace(WARPS=config.warps, MERGE_LINES=merged), config


def report(dim: int, capability: int) -> None:
    """Print what each form of the decode kernel takes of a multiprocessor."""
    print(f"head_dim {dim}, sm_{capability}, Triton {triton.__version__}: registers, bytes spilled, shared memory")
    for name, form, config in forms_of(dim):
        of_form = {"F": form, "READ": None, "CODES": None}
        target = GPUTarget("cuda", capability, 32)
        kernel = made(decode.decode, OF_DECODE, of_form, config.warps, config.stages, target)
        registers, spilled, shared = resources(kernel)
        print(f"{name:20} {registers:4} {spilled:5} {shared:8,}", flush=True)
        most = 8 if dim in HEAD_DIMS["codes"] else 48  # Triton 3.9 spills at 192 and 256, where 3.6 does not
        assert spilled <= most, f"{name} spills {spilled} bytes of registers"


def powers(text: str, dtype: str) -> set[float]:
    """Return log2 of the positive constants of a dtype, whole where they are powers of two; six digits are printed."""
    found = re.findall(rf"arith\.constant (?:dense<)?([\d.]+[eE][+-]\d+)>? : (?:tensor<[x\d]+x)?{dtype}\b", text)
    return {round(math.log2(float(one)), 4) for one in found if float(one)}


def wrong_units(text: str, lowest: tuple[int, ...]) -> str:
    """Say which constant of a packed middle in bfloat16 is not the power of two that it must be; "" if all are.

    Zero points are multiplied by the unit, scales by the unit over the number that code 1 has in its place of a byte,
    and logits and results by 1 / unit in float32. lowest: the lowest bit of every place.
    """
    must = {UNIT, *(UNIT - SUBNORMAL - bit for bit in lowest)}
    there = powers(text, "bf16") - {0}
    if must != there:
        return f"codes from {lowest}: log2 of the constants in bfloat16 is {sorted(there)}, not {sorted(must)}"
    found = {one for one in powers(text, "f32") if one > 32}
    return "" if found == {-UNIT} else f"log2 of the large constants in float32 is {found}, not {-UNIT}"


def main(dim: int) -> None:
    """Compile the forms that differ in what a constant switches on, at one head_dim."""
    form, move = FORM._replace(D=dim), {**MOVE, "D": dim, "TILE": moved(dim)}
    for change in ({}, {"VALUES": 1}, {"PAGE": 1}):
        compiles(ring.move, OF_MOVE, {**move, **change})
    page = {**HEADS, "D": dim, "PAGE": 64}
    compiles(evict.drop, OF_COMPACT, {**HEADS, "TILE": 256})
    compiles(evict.compact, OF_COMPACT, {"D": dim, "PAGE": 64, "SLICE": 64})
    keys = {**page, "TILE": 64}
    compiles(rkv_kernel.measure, OF_RKV, keys)
    compiles(rkv_kernel.rank, OF_RKV, {**keys, "KERNEL": 7, "EARLIER": True, "UNIT": WHOLE})
    for change in ({}, {"PAGE": 0}):
        compiles(rkv_kernel.repeats, OF_RKV, {**keys, "BLOCK": 64, "SPAN": 1024, "UNIT": WHOLE, **change})
    if dim not in HEAD_DIMS["codes"]:
        return
    for variant, lowest in (((0, 64, 0, 0, 8), (0,)), ((0, 0, 0, 128, 2), (0, 2, 4, 6))):
        codec = {"READ": banded.read, "CODES": banded.Codes((variant,), (9000,), 104000, True, 32)}
        text = compiles(decode.decode, OF_DECODE, {"F": form, **codec})
        assert not (wrong := wrong_units(text, lowest)), f"{wrong}; Triton may have made 0 of one"
    compiles(choose.attend, OF_CHOSEN, {**CHOSEN, "D": dim, "C": dim})
    for bits, label_step in ((16, 8), (4, 16)):
        labels = {**SCORED, "D": dim, "LABEL_STEP": label_step, "BITS": bits}
        compiles(choose.score_tokens, OF_CHOSEN, labels)
    for change in ({"PER": 1, "CAP": 64}, {"PER": 16, "CAP": 0}):
        compiles(choose.choose, OF_CHOSEN, {**CHOICE, **change})
    group = paged.Group(TABLE, TABLE, TABLE, "i32", "i32")
    of_pages = {
        "pages": NUMBER, "q": NUMBER, "out": NUMBER, "lengths": TABLE, "kept": group, "rest": group, "part": FLOATS,
        "stat": FLOATS, "done": TABLE, "scale": "fp32", "costs": TABLE, "bands": TABLE,
    }  # fmt: skip
    for even, block in ((True, 64), (False, 16)):
        served = paged.Form(8, 4, dim, 8, 8, 64, 24, even, 16, 4, 16, block, block)
        compiles(paged.decode, of_pages, {"F": served, "READ": paged.read_columns, "CODES": None})
    mixed = banded.Codes(((16, 32, 64, 64, 4), (0, 0, 0, 64, 3), (48, 0, 0, 0, 16)), (9000,) * 3, 104000, True)
    for codec in (mixed, mixed._replace(PACKED=True)):
        text = compiles(decode.decode, OF_DECODE, {"F": form, "READ": banded.read, "CODES": codec})
        assert not (wrong := wrong_units(text, (0, 2, 4))), f"{wrong}; Triton may have made 0 of one"
    of_move = {name: kind for name, kind in OF_MOVE.items() if name != "ranks"}
    of_move |= {"k": BYTES, "v": BYTES, "bands": TABLE}
    for group, packed in ((32, False), (64, False), (64, True)):
        compiles(banded.move, of_move, {**page, "G": group, "PACKED": packed})
    served = paged.Form(8, 4, dim, 8, 8, 64, 96, True, 16, 4, 16, 64, 8)
    for packed in (False, True):
        of_codes = {"READ": coded.read, "CODES": mixed._replace(BLOCK=64, PACKED=packed)}
        kernel = made(paged.decode, of_pages, {"F": served, **of_codes}, stages=3)
        print(f"codes in pages of a server, scales {'packed' if packed else 'whole'}: {resources(kernel)}")
    of_schedule = {"table": COUNT, "lengths": TABLE, "templates": COUNT, "costs": TABLE}
    sizes = {"HEADS": 8, "BATCH": 256, "WARPS": 8, "FEW": 32, "START": 32, "FEW_START": 128}
    made(schedule.make, of_schedule, {**HEADS, **sizes}, warps=1)
    compiles(coded.write, OF_CODES, {"D": dim, "BLOCK": 8})
    blocks = {"D": dim, "BLOCK": 64, "REST_BLOCK": 8}
    for packed in (False, True):
        made(coded.gather, OF_CODES, {**blocks, "PACKED": packed}, warps=8)
        compiles(coded.pack, OF_CODES, {**HEADS, **blocks, "PACKED": packed})


if __name__ == "__main__":
    report(int(sys.argv[1]), int((sys.argv[2:] or ["90"])[0]))
    main(int(sys.argv[1]))
