"""What a Segment holds after tokens have been appended, grown and sealed, against lists of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.cache.storage import segment as writing
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.segment import Extent, Segment, lines, words
from leank.eval.cache.storage.store import Store

HEADS, DIM = 3, 8


def random_masks(batch, generator, per_row, whole):
    """Masks of K and of V [B, H, D]; some heads keep no channel of K, some rows are alike; whole: K keeps all."""
    shape = (batch if per_row else 1, HEADS, 1)
    k, v = (torch.rand(*shape[:2], DIM, generator=generator) < torch.rand(shape, generator=generator) for _ in range(2))
    k &= torch.rand(shape, generator=generator) > 0.2
    return (k | whole).expand(batch, -1, -1), v.expand(batch, -1, -1)


def in_order(keep, labels):
    """Channels of a head that are kept, labels first."""
    kept = keep.nonzero().flatten().tolist()
    return kept if labels is None else sorted(kept, key=lambda channel: not labels[channel])


@settings(max_examples=40, derandomize=True)
@given(
    st.booleans(),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from([(0, 1, 2), (0,), (1, 2), (0, 2)]), st.integers(0, 150), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, writing.SCATTERED]),  # all rows at once, and row by row
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_tokens_are_where_they_were_put(per_row, prune_v, appends, scattered, whole, labelled, seed):
    """Rows alike and not, some of them at a time, pages begun and ended anywhere, heads with counts of their own."""
    generator = torch.Generator().manual_seed(seed)
    keep, keep_v = random_masks(3, generator, per_row, whole)
    labels = torch.rand(HEADS, DIM, generator=generator) < 0.4 if labelled else None
    like = torch.empty(3, HEADS, 0, DIM)
    values = KeptChannels.of(keep_v, like) if prune_v else None
    segment = Segment(
        Extent(KeptChannels.of(keep, like, labels), np.zeros((3, HEADS), int), DIM, torch.float32, values)
    )
    want = {at: [(torch.empty(0, DIM),) * 2] for at in np.ndindex(3, HEADS)}
    for rows, tokens, ragged in appends:
        segment = segment.grown(segment.capacity + tokens + 10)
        k, v = torch.randn(2, len(rows), HEADS, tokens, DIM, generator=generator)
        count = torch.randint(0, tokens + 1, (len(rows), HEADS), generator=generator).numpy() if ragged else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "COPIED", 1 << 10)  # several copies a head
            patch.setattr(writing, "SCATTERED", scattered)
            segment.append(np.array(rows), k, v, count)
        for r, head in np.ndindex(len(rows), HEADS):
            n = tokens if count is None else count[r, head]
            want[rows[r], head].append((k[r, head, :n], v[r, head, :n]))
    for (row, head), pieces in want.items():
        k, v = (torch.cat(x) for x in zip(*pieces, strict=True))
        got_k, got_v = segment.read(row, head)
        if not keep[row, head].any():
            assert len(got_k) == segment.capacity[row, head] == 0
            continue
        assert segment.length[row, head] == segment.length_dev[row, head] == len(k)
        assert torch.equal(got_k, k[:, in_order(keep[row, head], None if labels is None else labels[head])])
        assert torch.equal(got_v, v * keep_v[row, head] if prune_v else v)


@settings(derandomize=True)
@given(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.integers(1, 20), st.integers(0, 4))
def test_lines_are_the_same_in_words(dtype, width, number):
    """Copied by words, every line is where it was; a line that is no number of words is not cut into them."""
    flat, new = (torch.arange(i, i + width * number).to(dtype) for i in (0, 100))
    torch.index_select(words(flat, width), 0, torch.arange(number).flip(0), out=words(new, width))
    assert torch.equal(new, lines(flat, width).flip(0).flatten())
    assert words(flat, width).dtype == (dtype if width * dtype.itemsize % 8 else torch.int64)


@pytest.mark.parametrize("length", [1, 6, 7, 40, 127, 128, 129, 300])
def test_a_prompt_without_padding_is_sealed_as_one_with_a_mask(length):
    k, v = torch.randn(2, 2, HEADS, length, DIM)
    keep = torch.rand(HEADS, DIM) < 0.5
    stores = [Store(k, v, real, Middle(keep), Sizes(6, 70, 8)) for real in (None, torch.ones(2, length).bool())]
    for name, held in stores[0].tensors().items():
        other = stores[1].tensors()[name]
        if name in ("prompt.k", "prompt.v"):
            for at in np.ndindex(2, HEADS):
                assert all(map(torch.equal, stores[0].prompt.read(*at), stores[1].prompt.read(*at)))
        else:
            assert torch.equal(held, other), name


def test_a_tail_grows_rarely():
    """Growing copies all of it, so each time makes room for more than the tokens that are due."""
    store = Store(*torch.randn(2, 1, HEADS, 40, DIM), None, Middle(), Sizes(2, 6, 4))
    versions = set()
    for _ in range(20 * 4):
        store.append(*torch.randn(2, 1, HEADS, 1, DIM))
        store.flush()
        versions.add(store.version)
    assert store.tail.length.min() == 80
    assert len(versions) == 2  # before the first move, and since


def test_places_of_kept_channels():
    keep = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    table = KeptChannels.of(keep, torch.zeros(2, 3, 1, 4))
    assert table.ranks()[1].tolist() == [[-1, 0, -1, 1], [-1] * 4, [0, 1, 2, 3]]
    assert table.ranks() is table.ranks()
    other = table.select(torch.tensor([1]))
    assert torch.equal(other.ranks(), table.ranks()[:1])
    of_rows = KeptChannels.of(torch.stack([keep, ~keep]), torch.zeros(2, 3, 1, 4))
    assert of_rows.ranks()[1].tolist() == [[0, -1, 1, -1], [0, 1, 2, 3], [-1] * 4]
