"""The kernel that only reads: every word is read, in Triton's interpreter on a CPU."""

import pytest
import torch

pytest.importorskip("triton")  # Linux only

from scripts.bench.kernels.reading_kernel import LAUNCHES, _read
from tests.helpers.kernels import DEVICE


@pytest.mark.parametrize("block", sorted({block for block, _ in LAUNCHES}))
def test_the_largest_word_of_each_share_is_found(block):
    blocks = 5
    words = torch.randperm(block * blocks, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    _read(words, out, block)
    shares = [words[p * blocks // 3 * block : (p + 1) * blocks // 3 * block] for p in range(3)]
    assert out.tolist() == [int(share.max()) for share in shares]
