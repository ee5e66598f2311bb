"""What programs ask for before the launch ahead of theirs has ended, and that nothing changes by it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval.cache.test_kernel import DEVICE, ON_GPU, interpreter_takes_numpys_scalars  # noqa: F401

import triton  # isort: skip  (the line above skips where it is not installed)
import triton.language as tl  # isort: skip
from eval.cache.attention.early_kernel import shares  # isort: skip


@triton.jit
def asked(start, at, size, begin, number, WARPS: tl.constexpr):
    """Write what `shares` returns, with begin counted from start."""
    first, share = shares(start + at, size, WARPS)
    thread = tl.arange(0, WARPS * 32)
    tl.store(begin + thread, first - start.to(tl.int64, bitcast=True))
    tl.store(number + thread, share)


@pytest.mark.skipif(ON_GPU, reason="it is interpreted")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 500), st.integers(0, 70000), st.sampled_from([4, 8]), st.sampled_from([2, 4]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_shares_are_what_is_to_be_read(at, size, warps, width):
    """Requests follow each other without gaps, lie at multiples of 16 bytes, and end where what is to be read ends."""
    start = torch.zeros(1024, dtype={2: torch.float16, 4: torch.float32}[width], device=DEVICE)
    begin, number = torch.full((warps * 32,), -1), torch.full((warps * 32,), -1, dtype=torch.int32)
    asked[(1,)](start, at, size, begin, number, WARPS=warps)
    requests = [(b, n) for b, n in zip(begin.tolist(), number.tolist(), strict=True) if n]
    assert len(requests) <= warps
    assert all((start.data_ptr() + b) % 16 == n % 16 == 0 for b, n in requests)
    assert all(b + n == after for (b, n), (after, _) in itertools.pairwise(requests))
    if not requests:
        assert size * width < 16
    else:
        assert at * width - 16 < requests[0][0] <= at * width
        assert (at + size) * width - 16 < sum(requests[-1]) <= (at + size) * width
