"""What a codec's segment holds, against an oracle of the codec."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from leank.eval.cache.storage.segment import Extent

HEADS = 3
LAST = st.lists(st.integers(0, 150), min_size=2 * HEADS, max_size=2 * HEADS)  # tokens that each head takes last


def random_channels(seed, dim):
    """A mask [2, HEADS, dim] of random shares, with empty heads among them."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, HEADS, dim, generator=generator) < torch.rand(2, HEADS, 1, generator=generator) * 1.3
    return keep & (torch.rand(2, HEADS, 1, generator=generator) > 0.25)


def check_segment(codec, channels, dim, appends, last, seed, rounded, dtype=torch.float64, **close):
    """Two rows, part of them at a time, in room that grows; then a short last group, and the rows change places.

    channels: the `KeptChannels`. appends: whole groups, one append after the other. last: tokens of each row and head.
    rounded: (head, k, v) -> what is read of the tokens of a head that enter together, k [n, kept channels] in the order
    of `channels`, v [n, dim]. close: of `assert_close`; by default bit for bit.
    Returns (the segment, tokens of each row and head [2, HEADS]).
    """
    generator = torch.Generator().manual_seed(seed)
    segment = codec.segment(Extent(channels, np.full((2, HEADS), 64), dim, dtype))
    want = {at: [] for at in np.ndindex(2, HEADS)}
    for i, (groups, ragged) in enumerate([(g, None) for g in appends] + [(0, np.array(last).reshape(2, HEADS))]):
        rows = np.array([[0, 1], [1], [0]][i % 3] if ragged is None else [0, 1])
        tokens = groups * codec.group if ragged is None else max(last)
        k, v = torch.randn(2, len(rows), HEADS, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)
        segment = segment.grown(segment.capacity + tokens * (segment.capacity > 0))
        segment.append(rows, k, v, None if ragged is None else ragged[rows])
        for (r, row), head in itertools.product(enumerate(rows), range(HEADS)):
            n = tokens if ragged is None else ragged[row, head]
            index = channels.index[row, head, : int(channels.count[row, head])].long()
            want[row, head].append(rounded(head, k[r, head, :n, index], v[r, head, :n]))
    swapped = torch.tensor([1, 0])
    segment = segment.select(swapped, channels.select(swapped), None)
    for (row, head), pieces in want.items():
        for got, of_all in zip(segment.read(1 - row, head), zip(*pieces, strict=True), strict=True):
            held = torch.cat(of_all) if channels.count[row, head] else got[:0]
            torch.testing.assert_close(got, held, **(close or {"rtol": 0, "atol": 0}))
    return segment, np.array([sum(len(v) for _, v in pieces) for pieces in want.values()]).reshape(2, HEADS)
