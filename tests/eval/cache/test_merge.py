"""The merge of partial results against log-sum-exp in float64: in Triton's interpreter on a CPU, on the device with
`-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import DEVICE, ON_GPU

import triton  # isort: skip  (the line above skips where it is not installed)
import triton.language as tl  # isort: skip
from leank.eval.cache.attention.kernels.parts import merge  # isort: skip


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


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
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
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_merge_interpreted(first, parts, rows, lines, dim, empty, seed):
    check_merge(first, parts, rows, lines, dim, empty, seed)


@pytest.mark.skipif(ON_GPU, reason="the same on the device below")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_no_part_saw_a_token_the_result_is_zero():
    check_merge(2, 3, 4, 2, 64, [0, 1, 2], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("parts", "rows", "lines"), [(1, 4, 16), (34, 4, 16), (34, 4, 20), (50, 8, 8), (7, 32, 2)])
def test_merge_on_the_device(parts, rows, lines, dim):
    check_merge(5, parts, rows, lines, dim, [0, 3], 0)
