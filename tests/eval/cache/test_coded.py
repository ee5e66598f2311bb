"""Records are stored and read back bit for bit, whatever their bits mean as numbers."""

import numpy as np
import pytest
import torch

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import RecordCodec
from leank.eval.cache.storage.padded import Padded
from leank.eval.cache.storage.segment import Extent

WIDTH, DIM, HEADS, TOKENS = 32, 64, 2, 1024  # a head's records hold half of the 65,536 patterns of 16 bits


class FirstNumbers(RecordCodec):
    """A code whose records are the first numbers of a key."""

    width = WIDTH

    def encode(self, keys, rows):
        return keys[..., :WIDTH].contiguous()

    def decode(self, records, rows):
        return records


@pytest.mark.parametrize(("batch", "alike"), [(1, True), (4, False)], ids=["head by head", "all at once"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits_is_read_back(dtype, batch, alike):
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(1, HEADS, TOKENS, WIDTH)
    patterns = torch.cat([patterns, torch.zeros_like(patterns)], -1).repeat(batch, 1, 1, 1)
    k = patterns.view(dtype)
    count = np.full((batch, HEADS), TOKENS)
    if not alike:
        count[1:] -= np.arange(1, batch)[:, None]
    segment = FirstNumbers().segment(Extent(KeptChannels.of(None, k), count, DIM, dtype))
    segment.append(np.arange(batch), k, torch.zeros_like(k), count)
    padded = Padded(segment).keys(dtype).mT.unflatten(0, (batch, HEADS)).contiguous().view(torch.int16)
    for row in range(batch):
        for head in range(HEADS):
            n = count[row, head]
            expected = patterns[row, head, :n, :WIDTH]
            assert torch.equal(segment.read(row, head)[0].contiguous().view(torch.int16), expected)
            assert torch.equal(padded[row, head, :n], expected)
