"""Another prompt at the addresses that a captured step reads: the same attention, and nothing has moved."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Addresses, Store

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
