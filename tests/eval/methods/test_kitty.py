"""Kitty: what a segment holds of every head, against loops over groups and channels; bytes; and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Extent
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.bits.kitty import Boosted, Kitty
from tests.oracles.rounding import fake_quantise

HEADS, DIM = 3, 32


def by_hand(k, v, share, group):
    """k [n, C], v [n, D] as they are read back; a short group counts its last token again to choose channels."""
    found = k.clone()
    for start in range(0, len(k), group):
        cell = k[start : start + group]
        whole = torch.cat([cell, cell[-1:].expand(group - len(cell), -1)])
        sizes = [float(whole[:, c].double().abs().mean()) for c in range(k.shape[1])]
        large = sorted(range(k.shape[1]), key=lambda c: -sizes[c])[: int(share * k.shape[1] + 1e-6)]
        for c in range(k.shape[1]):
            found[start : start + group, c] = fake_quantise(cell[:, c], 4 if c in large else 2)
    return found, torch.cat([fake_quantise(x, 2) for x in v.split(group, 1)], 1)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    st.sampled_from([0.0, 0.125, 0.25, 1.0]), st.sampled_from([8, 16, 32]),
    st.sampled_from([torch.float64, torch.bfloat16]), st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 70), st.integers(0, 999),
)  # fmt: skip
def test_a_segment_holds_what_loops_say(share, group, dtype, appends, last, seed):
    """Ragged heads and an empty one, room that grows, a short last group."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, HEADS, DIM, generator=generator) < torch.rand(1, HEADS, 1, generator=generator) + 0.1
    keep[0, 1] = False
    channels = KeptChannels.of(keep, torch.empty(1, HEADS, 0, DIM))
    segment = Boosted(share, Packing(2, group)).segment(Extent(channels, np.full((1, HEADS), 64), DIM, dtype))
    want = [[], [], []]
    for tokens in [n * group for n in appends] + [last]:
        k, v = torch.randn(2, 1, HEADS, tokens, DIM, generator=generator, dtype=torch.float64).to(dtype)
        segment = segment.grown(segment.capacity + tokens * (segment.capacity > 0))
        segment.append(np.array([0]), k, v)
        for h in range(HEADS):
            want[h].append(by_hand(k[0, h][:, keep[0, h]], v[0, h], share, group))
    for h in range(HEADS):
        found = segment.read(0, h)
        for got, pieces in zip(found, zip(*want[h], strict=True), strict=True):
            torch.testing.assert_close(got, torch.cat(pieces) if keep[0, h].any() else got[:0], rtol=0, atol=0)


def test_larger_channels_come_back_better():
    x = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([10.0] * 4 + [1.0] * 12)
    codec = Boosted(0.25, Packing(2, 32))
    error = (codec.decode(*codec.encode(x, True), True) - x).abs().mean((0, 1)) / x.abs().mean((0, 1))
    assert float(error[:4].max()) < 0.5 * float(error[4:].min())


def test_bytes_of_a_page():
    """64 tokens of 128 channels in bfloat16, 16 of them boosted: 2 bits, 2 more, a scale and a zero point, numbers."""
    (codes, scales), (of_values, more) = Boosted(0.125, Packing(2, 32)).pages(128, 128, torch.bfloat16)
    assert int(codes) == 64 * (128 + 16) * 2 // 8 + 2 * 16
    assert int(scales) == 2 * 128 * 4
    assert (of_values, more) == (64 * 128 * 2 // 8, 2 * 128 * 4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="flush=8 must be a multiple of group=32"):
        Kitty().check_sizes(Sizes(2, 8, 8))
    with pytest.raises(ValueError, match="boosted"):
        Kitty(boosted=1.5)
