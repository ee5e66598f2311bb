"""Lethe's rounds, and what must hold whatever the attention is; whole replies are test_long_replies'."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.cache.attention.backend import Auto
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.eviction import HeavyHitters, largest
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Store
from leank.eval.methods.tokens.lethe import Lethe, hoyer
from tests.oracles import cache_attention as naive

SINK, WINDOW, FLUSH = SIZES = 2, 4, 3


def decoding(policy, steps, peaked, seed=0, start=60, heads=2, dim=8):
    """A store that evicts: yields it after sealing and after each step of random attention, peaked or nearly flat."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 2, heads, start, dim, generator=generator)
    scores = (torch.randn(2, heads, start, generator=generator) * (4 if peaked else 0.02)).exp()
    store = Store(k, v, None, Middle(eviction=policy), Sizes(*SIZES), scores=scores)
    yield store
    for _ in range(steps):
        position = store.append(*torch.randn(2, 2, heads, 1, dim, generator=generator))
        q = torch.randn(2, 2 * heads, 1, dim, generator=generator)
        naive.attend(store, q, position, 6.0 if peaked else 0.01)
        store.flush()
        yield store


def held(store):
    """Tokens of each row and head, in all."""
    ends = np.minimum(store.seen, SINK) + np.maximum(0, store.seen - store.start)
    return store.prompt.length + store.tail.length + ends[:, None]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(["text", "printed"]),
    st.booleans(),
    st.sampled_from([2.0, 400.0]),
    st.floats(0, 0.9),
    st.integers(2, 9),
    st.integers(0, 99),
)
def test_whatever_the_attention_memory_is_bounded_and_both_ends_stay(reading, peaked, tau, ratio, segments, seed):
    """No layer holds more than its limit; the ends are untouched; nothing leaves before the store expects it."""
    options = Lethe(tau, ratio, segments, 0.9, evict_at=20, reading=reading, limit=50)
    quiet, before = 0, None
    for store in decoding(options.eviction(None, None, Sizes(*SIZES)), 60, peaked, seed):
        middle = store.prompt.length + store.tail.length
        assert quiet <= 1 or np.array_equal(middle, before)
        quiet, before = store.quiet, middle
        assert held(store).max() <= 50
        assert (store.seen - store.start >= WINDOW).all()
        assert (store.eviction.evict_at <= 50).all()
        assert np.array_equal(store.eviction.held, held(store))
        memory, room = measure_store(store), 64 + 192 + SINK + 64  # slots of prompt, tail, sink and ring
        assert memory.total - memory.tables - memory.extra <= 2 * 2 * room * 2 * 8 * 4


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=20, max_size=60), st.floats(0, 0.9), st.integers(0, 3),
       st.integers(2, 6), st.floats(1.5, 50), st.integers(-2, 20))  # fmt: skip
def test_a_round_beyond_the_limit_keeps_sink_recent_and_best_of_the_others(values, ratio, sink, segments, tau, less):
    """Beside a row that holds three tokens more; the limit is `less` than what would stay without one."""
    count, scores = len(values), torch.tensor([[*values, 0, 0, 0]]).float()

    def of_round(limit):
        options = Lethe(tau, ratio, segments, 0.9, evict_at=19, limit=limit)
        policy = options.eviction(None, None, Sizes(*SIZES)).begin(scores[None], np.array([[count]]))
        (stay,) = policy._round(np.array([0]), scores, np.array([count]), np.array([sink]), np.array([0]))
        return set(stay[:count].nonzero().flatten().tolist()), int(policy.evict_at[0])

    free, wanted = of_round(0)
    limit = max(1, len(free) - less)
    bounded, evict_at = of_round(limit)
    assert evict_at == min(wanted, limit)
    if len(free) > limit:
        recent = int(ratio * limit)
        others = sorted(range(sink, count - recent), key=lambda i: (-values[i], -i))
        room = max(0, limit * (segments - 1) // segments - sink - recent)
        free = {*range(sink), *others[:room], *range(count - recent, count)}
    assert bounded == free


def test_layers_of_different_sparsity_have_different_budgets():
    options = Lethe(3.0, 0.1, 8, 0.9, evict_at=20)
    flat, peaked = (
        list(decoding(options.eviction(None, None, Sizes(*SIZES)), 30, peaked))[-1] for peaked in (False, True)
    )
    assert held(peaked).max() < 30 < held(flat).min()
    assert (flat.eviction.evict_at > peaked.eviction.evict_at).all()


def test_too_dense_a_layer_waits_where_a_sparsity_is_asked_for():
    common = {"sparse_ratio": 1.01, "recent_ratio": 0.1, "gamma": 0.9, "evict_at": 20}
    at_once, waits = (
        list(decoding(Lethe(**common, min_sparsity=least).eviction(None, None, Sizes(*SIZES)), 5, False))[-1]
        for least in (0.0, 0.9)
    )
    assert held(at_once).max() < 30 < held(waits).min()


def test_hoyer_sparsity():
    assert hoyer(torch.ones(7)) == pytest.approx(0, abs=1e-6)
    assert hoyer(torch.eye(5)[2]) == pytest.approx(1)
    assert hoyer(torch.tensor([3.0, 4.0])) == pytest.approx((2**0.5 - 7 / 5) / (2**0.5 - 1), abs=1e-6)
    a = torch.rand(50)
    assert float(hoyer(9 * a)) == pytest.approx(float(hoyer(a)), abs=1e-5)
    assert hoyer(a**4) > hoyer(a)


def test_of_equal_scores_the_later_tokens_stay():
    assert largest(torch.tensor([1.0, 2.0, 1.0, 1.0]), 2).tolist() == [False, True, False, True]


def test_rows_take_their_scores_and_thresholds_along():
    options = Lethe(3.0, 0.1, 8, 0.9, evict_at=20)
    store = list(decoding(options.eviction(None, None, Sizes(*SIZES)), 9, True))[-1]
    store.eviction.evict_at[:] = [21, 22]
    scores = store.eviction.scores.clone()
    store.select(torch.tensor([1, 1, 0]))
    assert store.eviction.evict_at.tolist() == [22, 22, 21]
    assert torch.equal(store.eviction.scores[2], scores[0])
    store.append(*torch.randn(2, 3, 2, 1, 8))
    naive.see(store.eviction, 0, 0, torch.ones(int(held(store)[0, 0])))
    assert torch.equal(naive.scores_of(store.eviction, 1, 0), scores[1, 0])  # rows that came from one go their own ways


def test_what_cannot_be_is_refused(monkeypatch):
    store = list(decoding(HeavyHitters(10), 4, True))[-1]
    with pytest.raises(ValueError, match="counted in the attention by which this layer evicts"):
        store.crop(1)
    with pytest.raises(ValueError, match="cannot be combined with a choice on the axis reads"):
        Middle(eviction=HeavyHitters(3), reads=object())
    monkeypatch.setattr("leank.eval.cache.attention.backend.why_not", lambda *args: None)
    store.middle = Middle(eviction=HeavyHitters(3), joins=torch.tensor([True, False]))
    with pytest.raises(RuntimeError, match="the kernel evicts where every head takes new tokens"):
        Auto(insist=True).choose(store, torch.randn(2, 4, 1, 8))
