"""The kernel in CUDA that reads pages of codes (`kernels/codes.cu`): where it can run, its memory, and its launch.

NVRTC compiles it, in a few seconds and once for a head's shape, whatever the widths. Elsewhere, and for more than 8
query rows of a KV head, `kernels.banded` reads the same pages.
"""

import ctypes
import functools
import struct
from contextlib import suppress
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.cuda import _utils as cuda

from leank.eval.cache.attention import schedule
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.precision import channel_bytes

ROWS = 8  # query rows of a KV head, at most
WARPS = 8  # of a program
RESIDENT = 16  # warps of a multiprocessor, at most: so many have 128 registers a thread
LEAST = 4096  # bytes of shared memory that a warp has for K, and for V: 16 tokens of sink or window, partial results
SPARE = 2048  # bytes of a program's shared memory that the kernel names itself, or the system takes
# Bytes of sink and window that a program reads in the time of an instruction of each warp; see `effort`.
BYTES_OF_EFFORT = 11.0


@functools.cache
def compiler() -> ctypes.CDLL | None:
    """NVRTC, which comes with PyTorch's CUDA builds; None = there is none."""
    if not torch.version.cuda:
        return None
    for prepare in (lambda: None, getattr(torch, "_preload_cuda_deps", lambda: None)):
        with suppress(OSError, ValueError):  # of a package that is not there; NVRTC's own may be loaded by then
            prepare()  # PyTorch loads the libraries of its own packages only where it does not find them otherwise
        with suppress(AttributeError, OSError):
            return cuda._get_gpu_rtc_library()
    return None


def compiles(nvrtc: ctypes.CDLL, capability: tuple[int, int]) -> bool:
    """Whether NVRTC knows GPUs of this compute capability: it may be older than the GPU, for which Triton compiles."""
    number = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(number))
    known = (ctypes.c_int * number.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    return 10 * capability[0] + capability[1] in known


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver, which PyTorch would look up anew for every launch."""
    return cuda._get_gpu_runtime_library()


def can_read(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel reads layers of this kind: of bfloat16, on a GPU with its products."""
    if device.type != "cuda" or dtype != torch.bfloat16 or dim not in HEAD_DIMS["codes"]:
        return False
    if (nvrtc := compiler()) is None:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and compiles(nvrtc, capability)


def warp_bytes(k: np.ndarray, v: np.ndarray) -> tuple[int, int]:
    """Bytes of shared memory that a warp has for K and for V, which hold the largest page; k, v: bytes of pages."""
    of_k, of_v = (round_up(max(int(page.max(initial=0)), LEAST), 128) for page in (k, v))
    return of_k, of_v


def memory(of_warp: tuple[int, int], dim: int) -> int:
    """Bytes of shared memory of a program: what its warps have, queries as operands and as they are, and channels."""
    return WARPS * sum(of_warp) + (dim // 16 + 3) * 256 + ROWS * dim * 2 + dim * 4


def most_memory(device: torch.device) -> int:
    """Bytes of shared memory of a program, at most."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def per_sm(of_warp: tuple[int, int], dim: int, device: torch.device) -> int:
    """Programs that fit a multiprocessor, with at most `RESIDENT` warps; 0 = none does."""
    needed = memory(of_warp, dim) + SPARE
    fit: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // needed
    return min(RESIDENT // WARPS, fit) if needed <= most_memory(device) else 0


def tile(tokens: np.ndarray, programs: int) -> int:
    """Tokens at whose multiples parts [P] are cut: a page for every warp, or half as many for few."""
    whole = WARPS * PAGE
    return whole if int((-(-tokens // whole)).sum()) >= programs else whole // 2


def effort(heads: np.ndarray, dim: int) -> np.ndarray:
    """Instructions of a warp for a page of heads, about, [...]; heads: [..., 6], see `quantised.Head`."""
    whole, eight, four, narrow, third = np.moveaxis(-(-heads[..., :5] // 16), -1, 0)
    of_keys = 40 * whole + 69 * eight + 59 * four + 71 * narrow + 21 * third
    of_values = np.zeros(17, dtype=np.int64)  # by bits
    of_values[[16, 8, 4, 3, 2]] = 250, 330, 340, 480, 340
    return 300 + of_keys + of_values[heads[..., 5]] * dim // 128


def constants(group: int) -> str:
    """Declarations for the kernel: the schedule's columns, and what a channel takes of a page, from its format.

    group: numbers of a quantisation group
    """
    names = {name: getattr(schedule, name) for name in ("SINK", "WINDOW", "PROMPT", "TAIL", "FIELDS")}
    names |= {column.name: column.value for column in schedule.Split} | {"PAGE": PAGE, "CELL": group}
    names |= {f"OF_{bits}": channel_bytes(bits, group=group) for bits in (16, 8, 4, 2)}
    names["OF_THIRD"] = channel_bytes(3) - channel_bytes(2)
    return f"enum {{ {', '.join(f'{name} = {n}' for name, n in names.items())} }};\n#line 1\n"


def cubin(nvrtc: ctypes.CDLL, capability: tuple[int, int], dim: int, group: int, rows: int, cell: int) -> bytes:
    """The kernel for heads of `dim` channels and `rows` query rows, compiled. Raises RuntimeError with NVRTC's log.

    group: query heads of a KV head; cell: numbers of a quantisation group
    """
    kernel = (files("leank.eval.cache.attention.kernels") / "codes.cu").read_text(encoding="utf-8")
    source = (constants(cell) + kernel).encode()
    sizes = {"D": dim, "GROUP": group, "ROWS": rows, "WARPS": WARPS}
    options = [
        "--gpu-architecture=sm_{}{}".format(*capability),
        "-std=c++17",
        *(f"-D{k}={n}" for k, n in sizes.items()),
    ]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text(kind: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, found)
        return found.raw

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"codes.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(f"NVRTC cannot compile codes.cu: {text('ProgramLog').decode(errors='replace')}")
        return text("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def compiled(dim: int, group: int, rows: int, cell: int, device: torch.device) -> Any:
    """The kernel on a device; see `cubin`."""
    nvrtc = compiler()
    assert nvrtc is not None
    with torch.cuda.device(device):
        binary = cubin(nvrtc, torch.cuda.get_device_capability(device), dim, group, rows, cell)
        module: Any = cuda._cuda_load_module(binary, ["decode"])
        kernel = module["decode"]
        kernel.set_shared_memory_config(most_memory(device) - SPARE)
    return kernel


class Attribute(ctypes.Structure):
    """CUDA's CUlaunchAttribute, with a number as its value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUDA's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("number", ctypes.c_uint),
    )


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, which PyTorch's own launch does not set
DEPENDENT = Attribute(id=6, value=1)


def launch(
    programs: int, rows: int, of_warp: tuple[int, int], cell: int, dependent: bool, table: Tensor, layer: Layer,
    queries: Queries, results: Results,
) -> None:  # fmt: skip
    """Run the kernel over a schedule.

    rows: query rows of a KV head for which there is room; of_warp: of `warp_bytes`
    cell: numbers of a quantisation group
    dependent: whether to use programmatic dependent launch
    """
    device, (_, heads, dim) = queries.q.device, layer.index.shape
    tensors = (
        *(layer.base, table, layer.index, layer.seen, layer.start, layer.tail, queries.q, queries.position),
        *(results.out, results.partial, results.stat, results.done),
    )
    (scaling,) = struct.unpack("<i", struct.pack("<f", queries.scale))
    numbers = (
        *(layer.index_b, queries.q_b, queries.q_h, queries.q_t, queries.tokens, layer.slots, heads),
        *(*of_warp, scaling),
    )
    values = [*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *map(ctypes.c_int, numbers)]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    config = LaunchConfig(
        *(programs, 1, 1, 32 * WARPS, 1, 1, memory(of_warp, dim)),
        torch.cuda.current_stream(device).cuda_stream,
        ctypes.pointer(DEPENDENT),
        int(dependent),
    )
    kernel = compiled(dim, queries.q.shape[1] // heads, rows, cell, device)
    with torch.cuda.device(device):
        cuda._check_cuda(driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, addresses, None))
