"""Several turns on one cache: later tokens come many at a time, and copies of a cache go separate ways."""

import copy

import pytest
import torch

from leank.eval.cache import Sizes, compressed_cache
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Store
from tests.helpers.cache_oracle import left_padded, random_keep, tiny_model
from tests.helpers.turns import METHODS, begin, conversation, go_on


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("lengths", [(31,), (40, 22)])
def test_a_turn_at_once_is_the_turn_token_by_token(name, lengths):
    """Padded turns of a batch answer as each row alone does, whose tokens come one by one; for every axis."""
    model, method = tiny_model("llama"), METHODS[name]
    turns = [turn[: len(lengths)] for turn in ((13, 5), (1, 1), (18, 11))]
    ids, mask, columns = conversation(lengths, turns)
    start = columns[0]
    cache = begin(method, model, ids[:, :start], mask[:, :start])
    got = go_on(model, cache, ids, mask, start, columns[1:])
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, mask[row]]
        alone = begin(method, model, own[:, :length], torch.ones(1, length, dtype=torch.bool))
        want = go_on(model, alone, own, torch.ones_like(own, dtype=torch.bool), length, [1] * (own.shape[1] - length))
        ends = torch.tensor([turn[row] for turn in turns]).cumsum(0) - 1
        for mine, end in zip(got, ends, strict=True):
            torch.testing.assert_close(mine[row : row + 1], want[end], rtol=1e-7, atol=1e-7)
        for a, b in zip(cache.layers, alone.layers, strict=True):
            assert (a.store.seen[row], a.store.start[row]) == (b.store.seen[0], b.store.start[0])
            assert (a.store.tail.length[row] == b.store.tail.length[0]).all()


def test_a_long_turn_slides_through_a_small_window():
    """A turn of many windows keeps no more tokens whole than the window may hold."""
    model = tiny_model("llama")
    ids, mask, columns = conversation((20,), [(300,)])
    cache = begin(METHODS["leank"], model, ids[:, :20], mask[:, :20])
    slots = cache.layers[0].store.ring_k.shape[2]
    go_on(model, cache, ids, mask, 20, columns[1:])
    store = cache.layers[0].store
    assert store.ring_k.shape[2] == slots
    assert 6 <= int((store.seen - store.start).max()) < 10


@pytest.mark.parametrize("name", METHODS)
def test_copies_go_separate_ways(name):
    """A copy, and each row of repeat(), goes on as the cache itself does, and leaves it as it is."""
    model, method = tiny_model("llama"), METHODS[name]
    ids, mask, columns = conversation((40, 22), [(13, 5), (9, 12)])
    start, middle = columns[0], sum(columns[:2])
    cache = begin(method, model, ids[:, :start], mask[:, :start])
    go_on(model, cache, ids, mask, start, columns[1:2])
    other, rows = ids.clone(), torch.tensor([0, 0, 1, 1])
    other[:, middle:] = other[:, middle:].flip(1)
    one, many = copy.deepcopy(cache), cache.repeat(2)
    go_on(model, one, other, mask, middle, columns[2:])
    (got,) = go_on(model, many, ids[rows], mask[rows], middle, columns[2:])
    (want,) = go_on(model, cache, ids, mask, middle, columns[2:])
    torch.testing.assert_close(got, want[rows], rtol=1e-7, atol=1e-7)
    again = begin(method, model, ids[:, :start], mask[:, :start])
    torch.testing.assert_close(go_on(model, again, ids, mask, start, columns[1:])[1], want, rtol=1e-7, atol=1e-7)


def test_a_copied_prompt_is_complete(recwarn):
    """Nothing warns of a chunk where a question follows the copy of a context."""
    model = tiny_model("llama")
    ids = left_padded([40], 1)[0]
    cache = compressed_cache(model, random_keep(9), 2, 6, 4)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :9], past_key_values=copy.deepcopy(cache))
        model(ids[:, :9].repeat(3, 1), past_key_values=cache.repeat(3))
    assert not recwarn
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="give the number of copies of each row"):
            cache.repeat(wrong)


def test_a_copied_store_makes_its_own_work_table():
    """The kernel's table holds addresses: with the old one a copy would read the original's tokens."""
    pytest.importorskip("triton")
    from leank.eval.cache.attention.launch import Kernel

    k, v = torch.randn(2, 1, 2, 300, 64)
    kernel, store = Kernel(programs=4), Store(k, v, None, Middle(), Sizes(4, 64, 32))
    plan = kernel.prepare(store)
    other = copy.deepcopy(store)
    assert other.plan is None
    assert not torch.equal(kernel.prepare(other).table, plan.table)
