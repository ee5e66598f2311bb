"""What the measurements of attention make of their times, and that all bytes are read."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")  # Linux only

from leank.eval.cache.storage.middle import Middle
from scripts.bench import attention
from scripts.bench.attention import DTYPE, SHAPE_LIST, fitted, main, random_keep
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


@pytest.mark.parametrize("dim", [64, 192, 256])
def test_a_random_mask_of_any_head_dim_has_its_share_of_the_bytes(dim, monkeypatch):
    keep = random_keep(8, dim)
    assert keep.float().mean() == pytest.approx(0.3, abs=0.02)
    assert (keep.view(8, -1, 32).sum(-1) % 32 == 0).all()
    shape = replace(SHAPE_LIST[0], batch=1, context=2048, dim=dim)
    random = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, device, dtype: random(*size, dtype=dtype))  # a GPU's, elsewhere
    store, _, _ = attention.make_store(shape, Middle(keep))
    middle, ends = 2048 - 1 - 128 - 1024, 128 + 1024 + 1
    of_middle = middle * int((keep.sum(-1) + dim * keep.any(-1)).sum())
    assert attention.needed_bytes(store) == (of_middle + 8 * ends * 2 * dim) * DTYPE.itemsize
    assert shape.query().shape == (1, 32, 1, dim)


def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="need a CUDA device"):
        main(["packed", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
