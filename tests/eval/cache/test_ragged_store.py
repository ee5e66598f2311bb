"""A store whose heads keep their own tokens and channels holds these and nothing else, in the formula's bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from leank.eval.cache import Sizes
from leank.eval.cache.attention.backend import Auto
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.padded import compacted
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import Store


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


def test_heads_that_take_no_tokens_stay_as_they_are():
    joins = torch.tensor([True, False, True])
    keep = torch.ones(3, 16, dtype=torch.bool)
    keep[2] = False
    store = random_store(4, Middle(keep, joins=joins))[0]
    before = store.prompt.length.copy()
    for _ in range(150):
        store.append(*torch.randn(2, 2, 3, 1, 16))
        store.flush()
    assert np.array_equal(store.prompt.length, before)
    assert (store.tail.length[:, 0] > 140).all()
    assert not store.tail.capacity[:, 1:].any()


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


def test_pruned_v_stays_out_of_kernels_that_evict_or_choose():
    pruned = {"values": torch.ones(3, 16, dtype=torch.bool)}
    assert Middle(**pruned).why_not_kernel is None
    for more in ({"eviction": HeavyHitters(4)}, {"reads": object()}):
        assert "every channel of V" in Middle(**pruned, **more).why_not_kernel
