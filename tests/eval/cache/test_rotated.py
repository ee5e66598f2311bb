"""Rotated middles (TurboQuant): levels, distortion, and what a segment holds, against the formula vector by vector."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache.storage.segment import Extent
from leank.eval.methods.bits.turboquant import Rotation, centroids, rotation
from tests.helpers.cache_oracle import SEEDS
from tests.helpers.channel_tables import random_tables


def test_levels_and_distortion_are_those_of_lloyd_and_max():
    """Max, Quantizing for Minimum Distortion (1960), table I: the levels, and the mean squared error of a normal."""
    torch.testing.assert_close(centroids(2), torch.tensor([-1.510, -0.4528, 0.4528, 1.510]).double(), atol=5e-4, rtol=0)
    assert centroids(4)[[8, 15]].tolist() == pytest.approx([0.1284, 2.733], abs=5e-4)
    x = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0))
    for bits, want in ((2, 0.1175), (4, 0.009497)):
        packing = Rotation(bits)
        back = packing.decode(*packing.encode(x, True), True)
        assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(want, rel=0.03)


def test_a_rotation_keeps_lengths_and_depends_on_its_seed():
    one, other = rotation(77, 0), rotation(77, 1)
    torch.testing.assert_close(one @ one.T, torch.eye(77).double())
    assert (one - other).norm() > 5


def test_one_large_channel_does_not_spoil_the_others():
    """What the rotation is for: the error is a share of the vector's norm, whichever channel is large."""
    generator = torch.Generator().manual_seed(0)
    x, packing = torch.randn(500, 64, generator=generator), Rotation(4)
    x[:, 3] += 50
    back = packing.decode(*packing.encode(x, True), True)
    assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(0.0095, rel=0.3)


def nearest(x, bits):
    """One vector x [d] coordinate by coordinate."""
    basis, levels, norm = rotation(len(x), 0), centroids(bits), x.norm()
    found = [levels[(levels - c).abs().argmin()] for c in x @ basis * len(x) ** 0.5 / norm]
    return norm / len(x) ** 0.5 * torch.stack(found) @ basis.T


@settings(max_examples=15, derandomize=True)
@given(st.sampled_from([2, 4]), st.lists(st.integers(1, 40), min_size=1, max_size=3), SEEDS)
def test_a_segment_holds_every_vector_rotated(bits, appends, seed):
    """Ragged heads, empty heads, part of the rows at a time, room that grows, rows selected; bytes are counted."""
    batch, heads, dim = 2, 3, 16
    (channels, keep), generator = random_tables(seed, batch, heads, dim), torch.Generator().manual_seed(seed)
    segment = Rotation(bits).segment(Extent(channels, np.full((batch, heads), 64), dim, torch.float64))
    tokens = {0: [], 1: []}
    for i, n in enumerate(appends):
        rows = np.array([[0, 1], [1], [0]][i % 3])
        k, v = torch.randn(2, len(rows), heads, n, dim, generator=generator, dtype=torch.float64)
        segment = segment.grown(segment.capacity + n * (segment.capacity > 0))
        segment.append(rows, k, v)
        for r, b in enumerate(rows):
            tokens[b].append((k[r], v[r]))
    turned = torch.tensor([1, 0])
    segment, held = segment.select(turned, channels.select(turned), None), 0
    for b in range(batch):
        for h in range(heads):
            got_k, got_v = segment.read(1 - b, h)
            k, v = (torch.cat([x[part][h] for x in tokens[b]]) if tokens[b] else k[:0, 0] for part in range(2))
            if not keep[b, h].any():
                assert len(got_k) == len(got_v) == 0
                continue
            count = int(keep[b, h].sum())
            for t in range(len(k)):
                torch.testing.assert_close(got_k[t], nearest(k[t, keep[b, h]], bits))
                torch.testing.assert_close(got_v[t], nearest(v[t], bits))
            held += len(k) * (-(-count * bits // 8) + dim * bits // 8 + 2 * 8)
    assert sum(segment.held()) == held


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="2 or 4 bits, not 8"):
        Rotation(8)
