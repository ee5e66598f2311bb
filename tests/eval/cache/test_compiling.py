"""Kernels compile for a GPU, in every form, on a machine without one."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from leank.eval.cache.attention.kernels.packed import step_of, unit_of


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernels_compile_for_a_gpu(tmp_path, dim):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tests.helpers.compiling", str(dim)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


class Named:
    """A dtype as Triton writes it."""

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_in_bytes_are_numbers_of_bfloat16(bits):
    """A byte below an empty one, read as bfloat16, is its code times `step_of`, for every code and place.

    Then code * (scale * unit / step) + zero * unit is the number times the unit, rounded once.
    """
    dtype, codes = Named("bf16"), torch.arange(2**bits)
    unit = unit_of(dtype, True)
    assert unit == 2.0**-64
    scale, zero = torch.tensor([0.0371, 3e4, 2.0**58], dtype=torch.bfloat16).double()[:, None], -1.5
    for place in range(8 // bits):
        step = step_of(dtype, bits, place)
        read = (codes << place * bits).to(torch.int16).view(torch.bfloat16).double()
        torch.testing.assert_close(read, codes.double() * step, rtol=0, atol=0)
        factor = torch.tensor(unit / step, dtype=torch.bfloat16)  # as the kernel has it
        scaled = (scale.bfloat16() * factor).double()
        got = read * scaled + (torch.tensor(zero).bfloat16() * torch.tensor(unit).bfloat16()).double()
        assert scaled.isfinite().all()
        torch.testing.assert_close(got / unit, codes * scale + zero, rtol=1e-12, atol=0)
