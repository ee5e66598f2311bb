"""The kernel in CUDA that reads pages of codes (`kernels/codes.cu`): where it can run, its memory, and its launch.

NVRTC compiles it, in a few seconds and once for a head's shape, whatever the widths. Elsewhere, and for more than 8
query rows of a KV head, `kernels.banded` reads the same pages.
"""

import ctypes
import functools
import struct
from contextlib import suppress
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.cuda import _utils as cuda

from leank.eval.cache.attention import schedule
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.storage.segment import PAGE, round_up
from leank.precision import BANDS, VALUE_BITS, channel_bytes

ROWS = 8  # query rows of a KV head, at most
WARPS = 8  # of a program
RESIDENT = 16  # warps of a multiprocessor, at most: so many have 128 registers a thread
LEAST = 4096  # bytes of shared memory that a warp has for K, and for V: ENDS tokens of sink or window, partial results
ENDS = 16  # tokens of sink and window that a warp reads at a time
SPARE = 2048  # bytes of a program's shared memory that the kernel names itself, or the system takes
# Bytes of sink and window that a program reads in the time of an instruction of each warp; see `effort`.
BYTES_OF_EFFORT = 11.0
NUMBERS = (torch.bfloat16, torch.float16)  # the dtypes that are read


class Pool(NamedTuple):
    """Where a server has the tokens of its requests; see `eval.serving.coded`."""

    kept: Tensor  # kept, rest: int32 [B, blocks], block tables of codes, and of whole tokens
    rest: Tensor
    lengths: Tensor  # int32 [B], tokens of each row
    stride: int  # bytes of a block
    page: int  # bytes of 64 tokens of codes, all layers, in a block
    sink: int  # sink, window: tokens, multiples of 64
    window: int
    block: int  # block, rest_block: tokens of a block, of codes and of whole tokens
    rest_block: int

    def argument(self) -> "PoolArgument":
        """What the kernel takes of it."""
        tensors = (x.data_ptr() for x in (self.kept, self.rest, self.lengths))
        return PoolArgument(
            *tensors, self.stride, self.page, self.kept.stride(0), self.rest.stride(0), self.sink, self.window
        )


class PoolArgument(ctypes.Structure):
    """The kernel's Pool."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kept", "rest", "lengths")),
        *((name, ctypes.c_longlong) for name in ("stride", "page")),
        *((name, ctypes.c_int) for name in ("kept_b", "rest_b", "sink", "window")),
    )


class Form(NamedTuple):
    """What the kernel is compiled for."""

    dim: int  # channels of a head
    group: int  # query heads of a KV head
    rows: int  # query rows of a program
    cell: int  # numbers of a quantisation group
    half: bool = False  # float16, not bfloat16
    block: int = 0  # block, rest_block: as in `Pool`; 0 = there is none
    rest_block: int = 1
    packed: bool = False  # whether scales are

    def defined(self) -> list[str]:
        """Options of the compiler."""
        sizes = {
            "D": self.dim, "GROUP": self.group, "ROWS": self.rows, "WARPS": WARPS, "HALF": int(self.half),
            "BLOCK": self.block, "REST_BLOCK": self.rest_block, "PACKED": int(self.packed),
        }  # fmt: skip
        return [f"-D{name}={number}" for name, number in sizes.items()]


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


def why_not(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernel does not read layers of this kind, None = it does: 16 bits, on a GPU with its products."""
    if device.type != "cuda":
        return f"it runs on a GPU, not on {device.type}"
    if dtype not in NUMBERS:
        return f"it reads bfloat16 and float16, not {dtype}"
    if dim not in HEAD_DIMS["codes"]:
        return f"it reads heads of {HEAD_DIMS['codes']} channels, not {dim}"
    if (nvrtc := compiler()) is None:
        return "this PyTorch has no NVRTC, which compiles it"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs a GPU of compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None if compiles(nvrtc, capability) else "this NVRTC is older than the GPU"


def can_read(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel reads layers of this kind."""
    return why_not(device, dtype, dim) is None


def warp_bytes(k: np.ndarray, v: np.ndarray) -> tuple[int, int]:
    """Bytes of shared memory that a warp has for K and for V, which hold the largest page; k, v: bytes of pages."""
    of_k, of_v = (round_up(max(int(page.max(initial=0)), LEAST), 128) for page in (k, v))
    return of_k, of_v


def memory(of_warp: tuple[int, int], dim: int) -> int:
    """Bytes of shared memory of a program: what its warps have, queries as operands and as they are, and channels."""
    return WARPS * sum(of_warp) + (dim // 16 + len(BANDS) - 1) * 256 + ROWS * dim * 2 + dim * 4


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
    """Instructions of a warp for a page of heads, about, [...]; heads: of `quantised.Head`."""
    whole, eight, four, narrow, third = np.moveaxis(-(-heads[..., :-1] // 16), -1, 0)
    of_keys = 40 * whole + 69 * eight + 59 * four + 71 * narrow + 21 * third
    of_values = {16: 250, 8: 330, 4: 340, 3: 480, 2: 340}
    by_width = np.array([of_values[bits] for bits in VALUE_BITS])
    return 300 + of_keys + by_width[np.searchsorted(VALUE_BITS, heads[..., -1])] * dim // 128


def constants(group: int, packed: bool = False) -> str:
    """Declarations for the kernel: the schedule's columns, and what a channel takes of a page, from its format.

    group: numbers of a quantisation group; packed: whether scales are
    """
    names = {name: getattr(schedule, name) for name in ("SINK", "WINDOW", "PROMPT", "TAIL", "FIELDS")}
    names |= {column.name: column.value for column in schedule.Split} | {
        "PAGE": PAGE,
        "CELL": group,
        "ENDS": ENDS,
        "BANDS": len(BANDS),
    }
    names |= {f"OF_{min(band)}": channel_bytes(min(band), group=group, packed=packed) for band in BANDS}
    names["OF_THIRD"] = channel_bytes(3) - channel_bytes(2)
    return f"enum {{ {', '.join(f'{name} = {n}' for name, n in names.items())} }};\n#line 1\n"


def cubin(nvrtc: ctypes.CDLL, capability: tuple[int, int], form: Form) -> bytes:
    """The kernel, compiled. Raises RuntimeError with NVRTC's log."""
    kernel = (files("leank.eval.cache.attention.kernels") / "codes.cu").read_text(encoding="utf-8")
    source = (constants(form.cell, form.packed) + kernel).encode()
    options = ["--gpu-architecture=sm_{}{}".format(*capability), "-std=c++17", *form.defined()]
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
def compiled(form: Form, device: torch.device) -> Any:
    """The kernel on a device; see `cubin`."""
    nvrtc = compiler()
    assert nvrtc is not None
    with torch.cuda.device(device):
        binary = cubin(nvrtc, torch.cuda.get_device_capability(device), form)
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


def arguments(
    of_warp: tuple[int, int], table: Tensor, layer: Layer, queries: Queries, results: Results, pool: Pool | None
) -> list[Any]:
    """What the kernel takes, in its order, as numbers of C; the other arguments are those of `launch`."""
    heads = layer.index.shape[1]
    tensors = (
        *(layer.base, table, layer.index, layer.seen, layer.start, layer.tail, queries.q, queries.position),
        *(results.out, results.partial, results.stat, results.done),
    )
    (scaling,) = struct.unpack("<i", struct.pack("<f", queries.scale))
    numbers = (
        *(layer.index_b, queries.q_b, queries.q_h, queries.q_t, queries.tokens, layer.slots, heads),
        *(*of_warp, scaling),
    )
    given = PoolArgument() if pool is None else pool.argument()
    return [*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *map(ctypes.c_int, numbers), given]


def form_of(rows: int, cell: int, layer: Layer, queries: Queries, pool: Pool | None, packed: bool = False) -> Form:
    """What the kernel is compiled for to read a layer; the arguments are those of `launch`."""
    _, heads, dim = layer.index.shape
    blocks = (0, 1) if pool is None else (pool.block, pool.rest_block)
    return Form(dim, queries.q.shape[1] // heads, rows, cell, queries.q.dtype == torch.float16, *blocks, packed)


def launch(
    programs: int, rows: int, of_warp: tuple[int, int], cell: int, dependent: bool, table: Tensor, layer: Layer,
    queries: Queries, results: Results, pool: Pool | None = None, packed: bool = False,
) -> None:  # fmt: skip
    """Run the kernel over a schedule.

    rows: query rows of a KV head for which there is room; of_warp: of `warp_bytes`
    cell: numbers of a quantisation group; packed: whether their scales are
    dependent: whether to use programmatic dependent launch
    pool: of a server; then `seen`, `start`, `tail` and `position` are not read
    """
    device = queries.q.device
    values = arguments(of_warp, table, layer, queries, results, pool)
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    config = LaunchConfig(
        *(programs, 1, 1, 32 * WARPS, 1, 1, memory(of_warp, layer.index.shape[-1])),
        torch.cuda.current_stream(device).cuda_stream,
        ctypes.pointer(DEPENDENT),
        int(dependent),
    )
    kernel = compiled(form_of(rows, cell, layer, queries, pool, packed), device)
    with torch.cuda.device(device):
        cuda._check_cuda(driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, addresses, None))
