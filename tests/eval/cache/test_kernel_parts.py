"""Parts of kernels: every code of a packed middle becomes its number, in the instructions, read here one by one, and in
the kernel; partial results are merged as log-sum-exp in float64 merges them."""

import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.helpers.kernels import DEVICE, ON_GPU  # skips where Triton is not installed

import triton  # isort: skip
import triton.language as tl  # isort: skip
from leank.eval.cache.attention.kernels.banded import joining, lowest_of  # isort: skip
from leank.eval.cache.attention.kernels.packed import instructions, numbers, step_of, unit_of  # isort: skip
from leank.eval.cache.attention.kernels.parts import merge  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(ON_GPU, reason="the same on the device below")
WORD, HALF, BYTE = 2**32 - 1, 2**16 - 1, 2**8 - 1
OF_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PLACES = [(bits, place) for bits in (2, 4, 8) for place in range(8 // bits)]


def bits_of(*numbers, dtype):
    """A register with the numbers, the first in the lower half."""
    low, high = (int(x) & HALF for x in torch.tensor(numbers, dtype=torch.float64).to(dtype).view(torch.int16))
    return torch.tensor(low | high << 16)


def halves(register, dtype):
    """The two numbers of registers, int64 [n], as float64 [n, 2]."""
    both = torch.stack([register & HALF, register >> 16], -1)
    return torch.where(both > 2**15 - 1, both - 2**16, both).to(torch.int16).view(dtype).double()


def run(ptx, given, dtype):
    """Carry out PTX on registers, int64 tensors by name; subnormal numbers are numbers. Returns all registers."""
    held = dict(given)
    for line in ptx.strip("{} \n").split(";")[1:]:
        if not line.strip():
            continue
        name, rest = line.split(None, 1)
        to, *words = (word.strip() for word in rest.split(","))
        x = [held[w] if w in held else torch.tensor(int(w, 0)) for w in words]
        if name == "mov.b32":
            held[to] = x[0]
        elif name == "and.b32":
            held[to] = x[0] & x[1]
        elif name in ("or.b32", "shl.b32", "shr.b32"):
            held[to] = {"or": x[0] | x[1], "shl": x[0] << x[1] & WORD, "shr": x[0] >> x[1]}[name[:-4]]
        elif name == "prmt.b32":
            both, chosen = x[0] | x[1] << 32, int(x[2])
            held[to] = sum((both >> 8 * (chosen >> 4 * i & 7) & BYTE) << 8 * i for i in range(4))
        else:
            assert name == {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}[dtype]
            a, b, c = (halves(y, dtype) for y in x)
            stored = (a * b + c).to(dtype).view(torch.int16).long() & HALF
            held[to] = stored[..., 0] | stored[..., 1] << 16
    return held


@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_the_instructions_give_every_code_exactly(bits, place, dtype):
    """All bytes, at scales of 1, 2, 4 and 8 and zero points 128 codes below 0: numbers that no rounding touches."""
    kind = OF_TRITON[dtype]
    unit, step = unit_of(kind, True), step_of(kind, bits, place)
    data = torch.arange(256).view(64, 4)
    scales, zeros = [unit / step * 2**i for i in range(4)], [-unit * 128 * 2**i for i in range(4)]
    given = {"$2": (data << torch.tensor([0, 8, 16, 24])).sum(-1)}
    for first, pair in ((3, scales), (5, zeros)):
        given |= {f"${first + i}": bits_of(*pair[2 * i : 2 * i + 2], dtype=dtype) for i in range(2)}
    held = run(instructions(kind, bits, place), given, dtype)
    found = torch.cat([halves(held[name], dtype) for name in ("$0", "$1")], -1) / unit
    want = ((data >> place * bits & 2**bits - 1) - 128) * torch.tensor([1, 2, 4, 8])
    assert torch.equal(found, want.double())


@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("place", "bit"), [(place, bit) for place in range(4) for bit in range(8)])
def test_the_instructions_join_every_code_of_three_bits_exactly(place, bit, dtype):
    """Each byte of lower bits beside four of highest ones, and each of highest ones beside four of lower ones."""
    kind = OF_TRITON[dtype]
    unit, step = unit_of(kind, True), step_of(kind, lowest_of(place), 1)
    every, some = torch.arange(256).view(64, 4), torch.tensor([0, 255, 90, 165]).expand(64, 4)
    lower, top = torch.cat([every, some]), torch.cat([some, every])
    shifts = torch.tensor([0, 8, 16, 24])
    given = {"$2": (lower << shifts).sum(-1), "$3": (top << shifts).sum(-1)}
    for first, pair in ((4, [unit / step * 2**i for i in range(4)]), (6, [-unit * 128 * 2**i for i in range(4)])):
        given |= {f"${first + i}": bits_of(*pair[2 * i : 2 * i + 2], dtype=dtype) for i in range(2)}
    held = run(joining(kind, place, bit), given, dtype)
    found = torch.cat([halves(held[name], dtype) for name in ("$0", "$1")], -1) / unit
    code = (lower >> 2 * place & 3) + (top >> bit & 1) * 4
    assert torch.equal(found, ((code - 128) * torch.tensor([1, 2, 4, 8])).double())


@triton.jit
def unpack(
    codes, scales, zeros, out, N: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """All bytes at every one of N scales and zero points, to out [N, 256]."""
    n, byte = tl.arange(0, N), tl.arange(0, 256)
    read = tl.load(codes + byte[None, None, :] + tl.zeros([1, N, 1], tl.int32))
    scale, zero = tl.load(scales + n)[None, :, None], tl.load(zeros + n)[None, :, None]
    x = numbers(read, scale, zero, PLACE, BITS, PTX)
    tl.store(out + n[None, :, None] * 256 + byte[None, None, :], x)


def check_codes(bits, place, dtype, ptx):
    """Codes of all bytes within half a unit in the last place of code * scale + zero, and alone exactly."""
    generator = torch.Generator().manual_seed(bits + place)
    scale = torch.cat([2.0 ** torch.arange(-8, 8), torch.rand(16, generator=generator)]).to(dtype)
    zero = torch.cat([torch.zeros(16), torch.randn(16, generator=generator) * 9]).to(dtype)
    data = torch.arange(256).to(torch.uint8).to(DEVICE)
    out = torch.empty(32, 256, dtype=dtype, device=DEVICE)
    unpack[(1,)](data, scale.to(DEVICE), zero.to(DEVICE), out, N=32, PLACE=place, BITS=bits, PTX=ptx)
    code = (torch.arange(256) >> place * bits & 2**bits - 1).double()
    want = code * scale.double()[:, None] + zero.double()[:, None]
    found = out.cpu().double() / unit_of(OF_TRITON[dtype], ptx)
    assert torch.equal(found[:16], want[:16])
    assert ((found - want).abs() <= want.abs() * torch.finfo(dtype).eps / 2).all()


@interpreted
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_every_code_interpreted(bits, place):
    check_codes(bits, place, torch.float16, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", OF_TRITON, ids=str)
@pytest.mark.parametrize(("bits", "place"), PLACES)
def test_every_code_on_the_device(bits, place, dtype):
    check_codes(bits, place, dtype, True)


# The merge of partial results


@triton.jit
def merged(
    part, stat, out, most, total, first, parts, R: tl.constexpr, LINES: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Write what `merge` returns."""
    result, m, z = merge(part, stat, first, parts, R, LINES, D)
    r, d = tl.arange(0, R), tl.arange(0, D)
    tl.store(out + r[:, None] * D + d[None, :], result)
    tl.store(most + r, m)
    tl.store(total + r, z)


def check_merge(first, parts, rows, lines, dim, empty, seed):
    """Partial results first .. first + parts - 1 among memory that holds NaN; those of `empty` saw no token."""
    generator = torch.Generator().manual_seed(seed)
    part = torch.full((first + parts + 3, rows, dim), torch.nan)
    stat = torch.full((first + parts + 3, rows, 2), torch.nan)
    of = slice(first, first + parts)
    part[of] = torch.randn(parts, rows, dim, generator=generator)
    m, z = torch.randn(2, parts, rows, generator=generator) * 20
    z = 1 + z.abs()
    for i in empty:
        part[first + i % parts], m[i % parts], z[i % parts] = 0, -torch.inf, 0
    stat[of] = torch.stack([m, z], -1)
    out, most, total = (torch.full(shape, torch.nan, device=DEVICE) for shape in ((rows, dim), (rows,), (rows,)))
    merged[(1,)](part.to(DEVICE), stat.to(DEVICE), out, most, total, first, parts, R=rows, LINES=lines, D=dim)
    top = m.double().amax(0)
    weight = torch.exp2(m.double() - top.nan_to_num(neginf=0))
    whole = (weight * z).sum(0)
    want = (part[of].double() * weight[..., None]).sum(0) / whole.where(whole > 0, 1)[:, None]
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(most.cpu().double(), top, rtol=0, atol=0)
    torch.testing.assert_close(total.cpu().double(), whole, rtol=1e-4, atol=0)


@interpreted
@settings(max_examples=10, derandomize=True)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 17),
    st.sampled_from([64, 128]),
    st.lists(st.integers(0, 39), max_size=4),
    st.integers(0, 99),
)
def test_merge_interpreted(first, parts, rows, lines, dim, empty, seed):
    check_merge(first, parts, rows, lines, dim, empty, seed)


@interpreted
def test_where_no_part_saw_a_token_the_result_is_zero():
    check_merge(2, 3, 4, 2, 64, [0, 1, 2], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("parts", "rows", "lines"), [(1, 4, 16), (34, 4, 16), (34, 4, 20), (50, 8, 8), (7, 32, 2)])
def test_merge_on_the_device(parts, rows, lines, dim):
    check_merge(5, parts, rows, lines, dim, [0, 3], 0)


def test_shapes_hold_no_attributes():
    """Triton 3.6, which PyTorch 2.11 brings, refuses F.M in a shape; later ones and the interpreter take it."""
    code = "".join(file.read_text() for file in (ROOT / "eval").rglob("kernels/*.py"))
    shapes = re.findall(r"tl\.(?:zeros|full)\(\[(.*?)\],", code)
    assert len(shapes) > 40
    assert [shape for shape in shapes if "F." in shape] == []


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernels_compile_for_a_gpu(tmp_path, dim):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tests.helpers.compiling", str(dim)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
