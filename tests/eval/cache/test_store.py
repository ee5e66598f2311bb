"""What a layer stores, against lists of tokens: segments, ragged stores, records, and what a captured step reads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from leank.eval.cache import Sizes
from leank.eval.cache.attention.backend import Auto, head_dims, why_not_shape
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage import segment as writing
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.codecs import RecordCodec
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.padded import Padded, compacted
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Extent, Segment
from leank.eval.cache.storage.store import Addresses, Store

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


# Stores whose heads keep their own tokens and channels


def random_store(seed, middle=None, sizes=(2, 5, 3), lengths=(60, 200), heads=3, dim=16):
    """(store, k, v, real, tokens) of random keys and tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), heads, max(lengths), dim)
    k, v = torch.randn(2, *shape, generator=generator)
    real = torch.arange(shape[2]) >= shape[2] - torch.tensor(lengths)[:, None]
    tokens = torch.rand(shape[:3], generator=generator) < torch.rand(len(lengths), heads, 1, generator=generator)
    tokens[:, 1] &= seed % 2 == 0  # every other seed a head without tokens
    return Store(k, v, real, middle or Middle(), Sizes(*sizes), tokens), k, v, real, tokens


def held(segment, row, head):
    """(K, V) of a head, the shape of its regions checked."""
    k, v = segment.read(row, head)
    assert len(k) == len(v) == segment.length[row, head] == segment.length_dev[row, head]
    assert segment.capacity[row, head] % 64 == 0
    assert segment.length[row, head] <= segment.capacity[row, head] < segment.length[row, head] + 64
    return k, v


@settings(max_examples=25, derandomize=True)
@given(st.integers(0, 2**20), st.booleans(), st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=3))
def test_a_segment_holds_the_chosen_tokens_and_channels_and_nothing_else(seed, prune_k, prune_v, rows):
    """After sealing, after selecting rows, and after half of the tokens have been evicted."""
    generator = torch.Generator().manual_seed(seed)
    keep, pruned = torch.rand(2, 3, 16, generator=generator) < torch.rand(2, 3, 1, generator=generator)
    store, k, v, real, tokens = random_store(seed, Middle(keep if prune_k else None, pruned if prune_v else None))

    def check(segment, rows, stay=None):
        for row, source in enumerate(rows):
            columns = real[source].nonzero()[:, 0][2:-5]
            for head in range(3):
                chosen = columns[tokens[source, head, columns]]
                if prune_k and not keep[head].any():
                    chosen = chosen[:0]
                if stay is not None:
                    chosen = chosen[stay[row][head]]
                got_k, got_v = held(segment, row, head)
                assert torch.equal(got_k, k[source, head, chosen][:, keep[head] if prune_k else slice(None)])
                want_v = v[source, head, chosen] * (pruned[head] if prune_v else 1)
                assert torch.equal(got_v, want_v)

    check(store.prompt, [0, 1])
    store.select(torch.tensor(rows))
    check(store.prompt, rows)
    stay = [[torch.rand(n, generator=generator) < 0.5 for n in lengths] for lengths in store.prompt.length.tolist()]
    most = max((len(s) for heads in stay for s in heads), default=0)
    padded = torch.stack([torch.stack([pad(s, (0, most - len(s))) for s in heads]) for heads in stay])
    check(compacted(store.prompt, padded), rows, stay)
    widths = pruned.sum(-1) if prune_v else torch.full((3,), 16)
    assert store.prompt.v.numel() == int((store.prompt.capacity * widths.numpy()).sum())


@pytest.mark.parametrize("pruned_values", [False, True])
def test_bytes_are_what_the_formula_says(pruned_values):
    """4096 tokens, heads with budgets of their own: tokens x channels of K and of V, two whole ends, within 3%."""
    heads, dim, sizes = 4, 64, Sizes(16, 128, 32)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, heads, 4096, dim, generator=generator).bfloat16()
    budget, channels = [3000, 700, 1500, 0], [64, 33, 16, 48]
    wide = [40, 64, 17, 3] if pruned_values else [dim] * heads
    tokens = torch.zeros(1, heads, 4096, dtype=torch.bool)
    for head, count in enumerate(budget):
        tokens[0, head, 16 + torch.randperm(4096 - 16 - 128, generator=generator)[:count]] = True
    keep, values = (torch.arange(dim) < torch.tensor(n)[:, None] for n in (channels, wide))
    store = Store(k, v, None, Middle(keep, values if pruned_values else None), sizes, tokens)
    formula = 2 * sum(n * (c + w) for n, c, w in zip(budget, channels, wide, strict=True))
    formula += 2 * 2 * heads * dim * (16 + 128)
    memory, storages = measure_store(store), {}
    assert memory.total - memory.slack - memory.tables == formula
    for tensor in store.tensors().values():
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert memory.total == sum(storages.values())
    assert (memory.total - memory.slack) / formula == pytest.approx(1, abs=0.03), memory
    room = 2 * 2 * heads * dim * (sizes.ring - sizes.window)  # of the window; of the middle less than a page a head
    assert room <= memory.slack < room + 2 * sum(64 * (c + w) for c, w in zip(channels, wide, strict=True))


def test_the_kernel_says_what_it_cannot(monkeypatch):
    monkeypatch.setattr("leank.eval.cache.attention.backend.why_not", lambda *args: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    store = random_store(0, Middle(bits=Packing(4, 8)))[0]
    q = torch.randn(2, 3, 1, 16)
    with pytest.warns(RuntimeWarning, match="plain PyTorch: the kernel reads groups of 32 or 64 numbers"):
        assert isinstance(Auto().choose(store, q), Plain)
    with pytest.raises(RuntimeError, match="cannot run: the kernel reads groups of 32 or 64 numbers"):
        Auto(insist=True).choose(store, q)


@pytest.mark.parametrize("dim", [192, 256])
def test_long_heads_have_a_kernel_over_numbers_in_16_bits_alone(dim):
    for middle in (Middle(), Middle(eviction=object())):
        assert why_not_shape(dim, 4, head_dims(middle)) is None
    for other in (Middle(bits=Packing(4, 32)), Middle(reads=object())):
        assert "has head_dim 64 and 128, the model" in why_not_shape(dim, 4, head_dims(other))


# Records, stored and read back bit for bit, whatever their bits mean as numbers

WIDTH, WHOLE, PAIR, TOKENS = 32, 64, 2, 1024  # a head's records hold half of the 65,536 patterns of 16 bits


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
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(1, PAIR, TOKENS, WIDTH)
    patterns = torch.cat([patterns, torch.zeros_like(patterns)], -1).repeat(batch, 1, 1, 1)
    k = patterns.view(dtype)
    count = np.full((batch, PAIR), TOKENS)
    if not alike:
        count[1:] -= np.arange(1, batch)[:, None]
    segment = FirstNumbers().segment(Extent(KeptChannels.of(None, k), count, WHOLE, dtype))
    segment.append(np.arange(batch), k, torch.zeros_like(k), count)
    padded = Padded(segment).keys(dtype).mT.unflatten(0, (batch, PAIR)).contiguous().view(torch.int16)
    for row in range(batch):
        for head in range(PAIR):
            n = count[row, head]
            expected = patterns[row, head, :n, :WIDTH]
            assert torch.equal(segment.read(row, head)[0].contiguous().view(torch.int16), expected)
            assert torch.equal(padded[row, head, :n], expected)


# Another prompt at the addresses that a captured step reads

SIZES = Sizes(2, 20, 4)


def a_store(seed, rows, length, keep, values=None):
    generator = torch.Generator().manual_seed(seed)
    return Store(*torch.randn(2, rows, 2, length, 16, generator=generator), None, Middle(keep, values), SIZES)


def decoded(store, seed, steps=12):
    """Attention outputs of some steps, flushes included."""
    generator, plain = torch.Generator().manual_seed(seed), Plain()
    outs = []
    for _ in range(steps):
        k, v, q = torch.randn(3, len(store.ring_k), 2, 1, 16, generator=generator)
        position = store.append(k, v)
        outs.append(plain.attend(store, q, position, 0.25))
        store.flush()
    return torch.cat(outs)


@settings(max_examples=30, derandomize=True)
@given(st.integers(0, 999), st.integers(1, 3), st.integers(30, 200), st.integers(30, 200), st.booleans())
def test_a_prompt_moves_to_the_addresses_of_the_one_before(seed, rows, before, now, per_row):
    keep = torch.rand(*((rows,) if per_row else ()), 2, 16, generator=torch.Generator().manual_seed(seed)) > 0.5
    old, moved, want = (a_store(s, rows, n, keep) for s, n in ((seed, before), (seed + 1, now), (seed + 1, now)))
    old.fit(0)
    decoded(old, seed)
    kept = Addresses.of(old)
    tensors = [t.data_ptr() for t in kept.tensors.values()]
    kept.take(moved)
    assert [t.data_ptr() for t in Addresses.of(moved).tensors.values()] == tensors
    assert moved.version != old.version
    assert torch.equal(decoded(moved, seed + 2), decoded(want, seed + 2))
    assert [t.data_ptr() for t in Addresses.of(moved).tensors.values()] == tensors


def test_another_shape_stays_where_it_is():
    keep = torch.ones(2, 16, dtype=torch.bool)
    other = a_store(1, 3, 90, keep)
    own = other.ring_k.data_ptr()
    Addresses.of(a_store(0, 2, 90, keep)).take(other)
    assert other.ring_k.data_ptr() == own


def test_the_next_prompts_kept_channels_of_v_go_there_too():
    def some(seed, width=7):
        order = torch.rand(2, 16, generator=torch.Generator().manual_seed(seed)).argsort(-1)
        return a_store(seed, 1, 200, order < 5, order < width)

    first, other = some(0), some(1)
    here, read = Addresses.of(first), first.values.ranks()
    want = other.values.ranks().clone()
    assert not torch.equal(read, want)
    here.take(other)
    assert other.values.ranks() is read
    assert torch.equal(read, want)
    assert Addresses.of(other).key() == here.key()
    assert Addresses.of(some(0, 9)).compiled != here.compiled  # a step is compiled for its widths
