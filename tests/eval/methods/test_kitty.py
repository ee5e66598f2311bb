"""Kitty: what a segment holds of every head, against loops over groups and channels; bytes; and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.bits.kitty import Boosted, Kitty
from tests.helpers.segments import LAST, check_segment, random_channels
from tests.oracles.bits import fake_quantise


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


@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    st.sampled_from([0.0, 0.125, 0.25, 1.0]), st.sampled_from([8, 16, 32]),
    st.sampled_from([torch.float64, torch.bfloat16]), st.lists(st.integers(0, 5), min_size=1, max_size=3), LAST,
    st.integers(0, 999),
)  # fmt: skip
def test_a_segment_holds_what_loops_say(share, group, dtype, appends, last, seed):
    channels = KeptChannels.of(random_channels(seed, 32), torch.empty(2, 3, 0, 32))
    codec = Boosted(share, Packing(2, group))
    check_segment(codec, channels, 32, appends, last, seed, lambda _, k, v: by_hand(k, v, share, group), dtype)


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
