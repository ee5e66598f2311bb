"""What the measurements of attention make of their times, and that all bytes are read."""

import math

import pytest
import torch

pytest.importorskip("triton")  # Linux only

from scripts.bench.attention import fitted, main
from scripts.bench.reading_kernel import LAUNCHES, read
from tests.helpers.kernels import DEVICE


def test_a_line_through_the_layers():
    """7 us a launch and 4000 GB/s come back, also from the strings of a CSV."""
    rows = [{"us": us, "bytes": str(size)} for size, us in ((size, 7 + size / 4e6) for size in (3e8, 4e8, 9e8))]
    assert fitted(rows) == pytest.approx((7, 4000))
    assert all(map(math.isnan, fitted(rows[:1] * 3)))


@pytest.mark.parametrize("block", sorted({block for block, _ in LAUNCHES}))
def test_the_reading_kernel_reads_every_word(block):
    """It finds the largest word of each program's share, in Triton's interpreter on a CPU."""
    blocks = 5
    words = torch.randperm(block * blocks, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    read(words, out, block)
    shares = [words[p * blocks // 3 * block : (p + 1) * blocks // 3 * block] for p in range(3)]
    assert out.tolist() == [int(share.max()) for share in shares]


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="need a CUDA device"):
        main(["packed", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
