"""Kernels compile for a GPU, in every form, on a machine without one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernels_compile_for_a_gpu(tmp_path, dim):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tests.helpers.compiling", str(dim)]
    ran = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
