"""Another prompt at the addresses that a captured step reads: the same attention, and nothing has moved."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Addresses, Store

SIZES = Sizes(2, 20, 4)


def a_store(seed, rows, length, keep):
    generator = torch.Generator().manual_seed(seed)
    return Store(*torch.randn(2, rows, 2, length, 16, generator=generator), None, Middle(keep), SIZES)


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


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.integers(1, 3), st.integers(30, 200), st.integers(30, 200), st.booleans())
def test_a_prompt_moves_to_the_addresses_of_the_one_before(seed, rows, before, now, per_row):
    keep = torch.rand(*((rows,) if per_row else ()), 2, 16, generator=torch.Generator().manual_seed(seed)) > 0.5
    old, moved, want = (a_store(s, rows, n, keep) for s, n in ((seed, before), (seed + 1, now), (seed + 1, now)))
    old.fit(0)
    decoded(old, seed)
    kept = Addresses.of(old)
    tensors = [t.data_ptr() for t in kept._tensors()]
    kept.take(moved)
    assert [t.data_ptr() for t in Addresses.of(moved)._tensors()] == tensors
    assert moved.version != old.version
    assert torch.equal(decoded(moved, seed + 2), decoded(want, seed + 2))
    assert [t.data_ptr() for t in Addresses.of(moved)._tensors()] == tensors


def test_another_shape_stays_where_it_is():
    keep = torch.ones(2, 16, dtype=torch.bool)
    other = a_store(1, 3, 90, keep)
    own = other.ring_k.data_ptr()
    Addresses.of(a_store(0, 2, 90, keep)).take(other)
    assert other.ring_k.data_ptr() == own
