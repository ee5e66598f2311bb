"""Run the kernel in CUDA, `codes.cu`, on a CPU: its own C++ but for PTX, in place of which `cuda_on_cpu.h` stands.

It needs g++. A test that has the CPU's tensors read by it patches `codes.launch` with `launch`.
"""

import ctypes
import functools
import re
import subprocess
from pathlib import Path

from leank.eval.cache.attention import codes

HELPER = Path(__file__).with_name("cuda_on_cpu.h")
CUDA = Path(codes.__file__).parent / "kernels" / "codes.cu"
ENTRY = """
static const void *const *given;
static const int *numbers;
static const Pool *pool;
static void entry() {
  decode((const u16 *)given[0], (const i64 *)given[1], (const int *)given[2], (const i64 *)given[3],
         (const i64 *)given[4], (const i64 *)given[5], (const u16 *)given[6], (const i64 *)given[7], (u16 *)given[8],
         (float *)given[9], (float *)given[10], (int *)given[11], numbers[0], numbers[1], numbers[2], numbers[3],
         numbers[4], numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], *pool);
}
extern "C" bool run(int programs, int memory, const void *const *pointers, const int *others, const void *of_pool) {
  given = pointers, numbers = others, pool = (const Pool *)of_pool, memory_size = memory, outside = false;
  run_blocks(programs, THREADS, entry);
  return outside;
}
extern "C" u32 scales(u32 words) { return scale_of(words); }
"""


def source(form: codes.Form) -> str:
    """The kernel as C++ for a CPU."""
    text = CUDA.read_text(encoding="utf-8")
    begin, end = text.index("DEVICE u32 shared_address"), text.index("// What a warp has asked for")
    text = text[:begin] + text[end:]  # PTX, of which the helper has each function
    text = re.sub(r"#if __CUDA_ARCH__ >= 900.*?#else(.*?)#endif", r"\1", text, flags=re.DOTALL)
    for pattern, plain in (
        (r"typedef unsigned char u8;.*?typedef long long i64;\n", ""),
        (r"#define DEVICE .*", ""),
        (r"extern __shared__ .* memory\[\];", "u8 *memory = shared_memory;"),
        (r"__shared__ ", "static "),
        (r'extern "C" __global__ void __launch_bounds__\(.*?\) decode', "static void decode"),
        (r'asm volatile\("st\.shared\.b16 .*?" :: "r"\((.*?)\), "h"\(\(u16\)0\) : "memory"\);', r"store_half(\1, 0);"),
    ):
        text, found = re.subn(pattern, plain, text, flags=re.DOTALL if "typedef" in pattern else 0)
        assert found, pattern
    assert "asm" not in text
    return f'#include "{HELPER}"\n{codes.constants(form.cell, form.packed)}{text}{ENTRY}'


@functools.cache
def compiled(folder: Path, form: codes.Form) -> ctypes.CDLL:
    """The kernel in a form, compiled into a folder."""
    made = folder / f"{'-'.join(map(str, form))}.so"
    given = ["g++", "-O0", "-std=c++20", "-w", "-shared", "-fPIC", *form.defined()]
    subprocess.run([*given, "-x", "c++", "-", "-o", str(made)], input=source(form), text=True, check=True)
    return ctypes.CDLL(str(made))


def launch(
    folder: Path, programs, rows, of_warp, cell, dependent, table, layer, queries, results, pool=None, packed=False
) -> None:
    """What `codes.launch` does, on a CPU."""
    *others, of_pool = codes.arguments(of_warp, table, layer, queries, results, pool)
    tensors = [x for x in others if isinstance(x, ctypes.c_void_p)]
    numbers = [x for x in others if isinstance(x, ctypes.c_int)]
    kernel = compiled(folder, codes.form_of(rows, cell, layer, queries, pool, packed))
    kernel.run.restype = ctypes.c_bool
    outside = kernel.run(
        programs, codes.memory(of_warp, layer.index.shape[-1]), (ctypes.c_void_p * len(tensors))(*tensors),
        (ctypes.c_int * len(numbers))(*numbers), ctypes.byref(of_pool),
    )  # fmt: skip
    assert not outside, "the kernel needs more shared memory than `codes.memory` says"
