"""Sparsity while decoding, similarity of heads, and the tokens that Lethe's cache holds."""

import numpy as np
import pytest
import torch

from leank.eval.cache.storage.sizes import Sizes
from leank.eval.methods.tokens.lethe import Lethe
from scripts.analyses.lethe import growth, head_similarity, held_while_decoding, retained_tokens, sparsity
from tests.helpers.analysis_source import GROUP, HEADS, LAYERS, LENGTH, attention, only, prompt, qkv, source, tiny_model

TASK = "niah_single_2"


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


def test_rows_of_retained_tokens():
    """A dense cache holds what it has seen; with rounds, a layer holds less, and never more than it has seen."""
    given = {"samples": 2, "steps": 20, "sink": 4, "window": 12, "flush": 4}
    dense = retained_tokens(source(), TASK, LENGTH, **given, evict_at=10_000)
    held, seen = (only(dense, measure=name, sample=0) for name in ("held", "seen"))
    end = prompt().shape[1]
    assert [one["value"] for one in held] == [one["value"] for one in seen] == [end + 4 * i for i in range(5)] * LAYERS
    assert [one["value"] for one in only(dense, measure="growth")] == [1.0] * 2 * LAYERS
    rounds = retained_tokens(source(), TASK, LENGTH, **given, evict_at=64, sparse_ratio=2.0)
    held, seen = (only(rounds, measure=name) for name in ("held", "seen"))
    assert all(a["value"] <= b["value"] for a, b in zip(held, seen, strict=True))
    assert held[4]["value"] < seen[4]["value"]


def test_samples_side_by_side_hold_what_each_holds_alone():
    """Prompts of other lengths stand beside each other, padded; each alone is what it is in their company."""
    found = source()
    prompts = [found.ids(found.sample(TASK, LENGTH, index))[0].tolist()[: -3 * index or None] for index in range(3)]
    given = (24, Lethe(evict_at=64, sparse_ratio=2.0), Sizes(4, 12, 4))
    together = held_while_decoding(found, prompts, *given)
    assert len({*together[0, 0, 0]}) > 1
    for index, one in enumerate(prompts):
        assert (held_while_decoding(found, [one], *given)[..., 0] == together[..., index]).all()


@pytest.mark.parametrize(("held", "wanted"), [([4, 5, 6, 7, 8, 9], 1.0), ([4, 9, 4, 9, 4, 9], 0.0),
                                              ([4, 5, 6, 6, 6, 6], 0.0), ([4, 6, 4, 5, 4, 5], -1 / 3)])  # fmt: skip
def test_growth_is_that_of_the_peak(held, wanted):
    assert growth(4 + np.arange(6), np.array(held)) == pytest.approx(wanted)
