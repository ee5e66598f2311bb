"""Sparsity while decoding, similarity of heads, and the tokens that Lethe's cache holds."""

from itertools import pairwise

import pytest
import torch

from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.base import Method
from leank.eval.methods.tokens.lethe import Lethe
from scripts.analyses.lethe import Record, head_similarity, recorded, retained_tokens, sparsity
from tests.helpers.analysis_source import GROUP, HEADS, LAYERS, LENGTH, attention, only, qkv, source, tiny_model

TASK = "niah_single_2"


def prompt():
    found = source()
    return found.ids(found.sample(TASK, LENGTH, 0))


def rounds(prompts, steps):
    return recorded(source(), prompts, steps, Lethe(evict_at=64, sparse_ratio=2.0), Sizes(4, 12, 4))


@torch.no_grad()
def written(ids, steps):
    """The prompt and the tokens that greedy decoding adds, each from a whole pass."""
    for _ in range(steps):
        ids = torch.cat([ids, tiny_model()(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def test_sparsity_of_every_step():
    rows = sparsity(source(), (TASK,), LENGTH, steps=2, every=2)
    ids = prompt()
    end, whole = ids.shape[1], written(ids, 2)
    for layer, (q, k, _) in enumerate(qkv(whole)):
        for step in (0, 2):
            s = attention(q, k)[:, end - 1 + step, : end + step].sum(0)
            n = len(s) ** 0.5
            wanted = (n - s.sum() / s.square().sum().sqrt()) / (n - 1)
            mine = only(rows, measure="hoyer", layer=layer, step=step)
            assert [one["value"] for one in mine] == pytest.approx([wanted.item()], abs=1e-6)
    assert len(only(rows, measure="hoyer")) == 2 * LAYERS


def test_similarity_of_heads():
    rows = head_similarity(source(), TASK, LENGTH, queries=8, sink=4, window=24)
    for layer, (q, k, _) in enumerate(qkv(prompt())):
        given = attention(q, k)[:, -8:].sum(1)
        for part, some in (("all", given), ("middle", given[:, 4:-24])):
            found = []
            for i in range(HEADS * GROUP):
                for j in range(i + 1, HEADS * GROUP):
                    found.append(((some[i] @ some[j]) / some[i].norm() / some[j].norm()).item())
                    one = only(rows, measure="cosine", layer=layer, part=part, head=i, other_head=j)
                    assert one[0]["value"] == pytest.approx(found[-1], abs=1e-6)
            mean = only(rows, measure="mean_cosine", layer=layer, part=part)[0]["value"]
            assert mean == pytest.approx(sum(found) / len(found), abs=1e-6)


def test_recorded_places_are_those_that_the_cache_holds(monkeypatch):
    """The keys of the prompt that are in the cache are the dense keys at the places that the record names."""
    caches = []
    make = Method.cache
    monkeypatch.setattr(Method, "cache", lambda *args: caches.append(make(*args)) or caches[-1])
    records = rounds([prompt()[0].tolist()], 20)
    dense, end = qkv(prompt()), prompt().shape[1]
    total = end + 19  # the last token is not read
    fewer = 0
    for layer, (record,), (_, k, _) in zip(caches[0].layers, records, dense, strict=True):
        assert record.total == total
        assert isinstance(layer, CompressedLayer)
        assert layer.store is not None
        places = record.middle
        of_prompt = places[places < end]
        for head in range(HEADS):
            assert int(layer.store.prompt.length[0, head] + layer.store.tail.length[0, head]) == len(places)
            keys, _ = layer.store.prompt.read(0, head)
            some = of_prompt[: len(keys)]  # keys of the prompt's end came through the window
            assert torch.allclose(keys, k[head * GROUP, some], atol=1e-6)
        assert len(record.places()) == 4 + len(places) + int(layer.store.seen[0] - layer.store.start[0])
        fewer += len(record.places()) < total
    assert fewer


def test_rows_of_retained_tokens():
    rows = retained_tokens(source(), TASK, LENGTH, steps=20, sink=4, window=12, flush=4, evict_at=64,
                           sparse_ratio=2.0, bins=8)  # fmt: skip
    for layer, (record,) in enumerate(rounds([prompt()[0].tolist()], 20)):
        places, edges = record.places().tolist(), [record.total * number // 8 for number in range(9)]
        wanted = [sum(a <= x < b for x in places) / (b - a) for a, b in pairwise(edges)]
        assert [one["value"] for one in only(rows, measure="retained", layer=layer)] == pytest.approx(wanted)
        held, seen = (only(rows, measure=name, layer=layer) for name in ("held", "seen"))
        assert all(a["value"] <= b["value"] for a, b in zip(held, seen, strict=True))
    assert Record(2, 9).places().tolist() == [0, 1]


def test_samples_side_by_side_hold_what_each_holds_alone():
    """Prompts of other lengths stand beside each other, padded; each alone is what it is in their company."""
    found = source()
    prompts = [found.ids(found.sample(TASK, LENGTH, index))[0].tolist()[: -3 * index or None] for index in range(3)]
    together = rounds(prompts, 24)
    assert len({record.prompt for record in together[0]}) > 1
    for index in range(3):
        for layer, (record,) in enumerate(rounds([prompts[index]], 24)):
            other = together[layer][index]
            assert record.history == other.history
            assert record.places().tolist() == other.places().tolist()


def test_rows_are_spaced():
    record = Record(0, 4, history=[(step, step) for step in (4, 5, 6, 9, 10, 30)])
    assert [seen for seen, _ in record.spaced(4)] == [4, 9, 30]


@pytest.mark.parametrize(("held", "growth"), [([4, 5, 6, 7, 8, 9], 1.0), ([4, 9, 4, 9, 4, 9], 0.0),
                                              ([4, 5, 6, 6, 6, 6], 0.0), ([4, 6, 4, 5, 4, 5], -1 / 3)])  # fmt: skip
def test_growth_is_that_of_the_peak(held, growth):
    record = Record(0, 4, history=[(4 + step, count) for step, count in enumerate(held)])
    assert record.growth() == pytest.approx(growth)
