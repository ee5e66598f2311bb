"""Kernels compile for a GPU, in every form, on a machine without one."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from leank.eval.cache.attention.kernels.packed import step_of, unit_of
from tests.helpers.compiling import wrong_units


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_the_kernels_compile_for_a_gpu(tmp_path, dim):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tests.helpers.compiling", str(dim)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


PRINTED = "%a = arith.constant dense<{}> : tensor<4x32xbf16>\n%b = arith.constant dense<{}> : tensor<4x64xbf16>\n"
PRINTED += "%c = arith.constant {} : f32 loc(#loc1)"


@pytest.mark.parametrize(
    ("zero", "scale", "divisor", "said"),
    [
        ("5.421010e-20", "5.902950e+20", "1.84467441E+19", ""),
        ("0.000000e+00", "5.902950e+20", "1.84467441E+19", "[69.0], not [-64, 69]"),
        ("1.084202e-19", "5.902950e+20", "1.84467441E+19", "[-63.0, 69.0], not [-64, 69]"),
        ("5.421010e-20", "1.180590e+21", "1.84467441E+19", "[-64.0, 70.0], not [-64, 69]"),
        ("5.421010e-20", "5.902950e+20", "9.22337204E+18", "float32 is {63.0}, not 64"),
    ],
)
def test_a_unit_that_is_rounded_to_0_or_off_by_a_power_of_two_is_noticed(zero, scale, divisor, said):
    """The check of `tests.helpers.compiling`, on constants as Triton prints them."""
    found = wrong_units(PRINTED.format(zero, scale, divisor), 8)
    assert said in found
    assert bool(found) == bool(said)


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


def test_other_dtypes_have_no_unit():
    assert [unit_of(Named(name), ptx) for name, ptx in (("fp16", True), ("bf16", False), ("fp32", True))] == [1.0] * 3
