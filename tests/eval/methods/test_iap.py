"""IAP against the paper's equations, recomputed from the matrices, and against ThinK on the reference model."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.benchmarks.base import Cell
from leank.eval.benchmarks.ruler import Ruler
from leank.eval.inference.models import ModelConfig, load_config, load_model
from leank.eval.inference.prefill import prefill
from leank.eval.inference.prompts import encode
from leank.eval.methods.channels.iap import IAP, greedy, interactions, salient
from leank.eval.methods.channels.think import ThinK
from tests.helpers.cache_oracle import tiny_model
from tests.helpers.replay_tools import prompts

OFF = {"salient_min": 0.0, "salient_max": 0.0}


def error(q, k, dropped):
    """E(B) = ||Q K^T - Q S K^T||_F^2, summed over the query heads q [G, n, D] of one KV head k [T, D]."""
    stays = torch.ones(k.shape[1], dtype=k.dtype)
    stays[list(dropped)] = 0
    return sum(torch.linalg.matrix_norm(one @ k.T - one @ torch.diag(stays) @ k.T).item() ** 2 for one in q)


def delta(q, k, i, dropped):
    """Eq. 4's Delta_i of a channel i of B = dropped and i, term by term."""
    own = sum(torch.linalg.matrix_norm(torch.outer(one[:, i], k[:, i])).item() ** 2 for one in q)
    return own + sum(((k[:, i] @ k[:, j]) * (one[:, i] @ one[:, j])).item() for j in dropped for one in q)


@st.composite
def heads(draw):
    """Queries [1, H * G, n, D] and keys [1, H, T, D] whose channels depend on each other, some zero or equal."""
    kv, group, dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(3, 9))
    tokens, observed, rank = draw(st.integers(1, 12)), draw(st.integers(1, 6)), draw(st.integers(1, dim))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def matrix(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = matrix(1, kv * group, observed, rank) @ matrix(1, kv * group, rank, dim)
    k = matrix(1, kv, tokens, rank) @ matrix(1, kv, rank, dim)
    k[..., draw(st.integers(0, dim - 1))] *= draw(st.sampled_from([0.0, 1.0, 10.0]))
    if draw(st.booleans()):
        q[..., 0], k[..., 0] = q[..., 1], k[..., 1]
    return q, k


@given(heads(), st.sampled_from([1.0, 2.0]), st.data())
@settings(max_examples=30, deadline=None)
def test_every_step_takes_the_least_of_an_exhaustive_recomputation(drawn, interaction, data):
    """interaction=2: of all candidates the one that raises E(B) least. 1: the one of the least Delta_i (Eq. 4)."""
    queries, keys = drawn
    kv, dim = keys.shape[1], keys.shape[3]
    protected = torch.tensor(data.draw(st.lists(st.booleans(), min_size=dim, max_size=dim)))
    protected[data.draw(st.integers(0, dim - 1))] = False
    protected = protected.expand(1, kv, dim)
    matrix, _ = interactions(queries, keys)
    steps = [greedy(matrix, n, protected, interaction) for n in range(int((~protected[0, 0]).sum()) + 1)]
    assert not steps[0].any()
    for head in range(kv):
        q, k = queries[0].unflatten(0, (kv, -1))[head], keys[0, head]
        scale = error(q, k, range(dim)) + sum(delta(q, k, i, ()) for i in range(dim)) + 1e-30
        for before, after in itertools.pairwise(steps):
            dropped = before[0, head].nonzero().flatten().tolist()
            (new,) = (after & ~before)[0, head].nonzero().flatten().tolist()
            assert not (before & ~after).any()
            candidates = [i for i in range(dim) if i not in dropped and not protected[0, head, i]]
            assert new in candidates
            if interaction == 2:
                value = {i: error(q, k, [*dropped, i]) for i in candidates}
            else:
                value = {i: delta(q, k, i, dropped) for i in candidates}
            assert value[new] <= min(value.values()) + 1e-9 * scale


@given(st.integers(0, 2**32), st.integers(2, 40), st.floats(0, 0.5), st.floats(0, 0.49))
@settings(max_examples=30, deadline=None)
def test_salient_channels_are_the_largest_and_within_bounds(seed, dim, low, more):
    high = low + more
    norms = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp()
    kept = salient(norms, low, high)
    for row, chosen in zip(norms, kept, strict=True):
        mean = row.sum() / dim
        deviation = ((row - mean).square().sum() / (dim - 1)).sqrt()
        wanted = sum(bool(x > mean + deviation) for x in row)
        assert chosen.sum() == min(max(wanted, int(low * dim)), int(high * dim))
        if chosen.any() and not chosen.all():
            assert row[chosen].min() >= row[~chosen].max()


def test_salient_channels_are_never_pruned():
    model, (ids,) = tiny_model("llama"), prompts([40])
    seen = prefill(model, torch.tensor([ids]), None, 0, 8)
    chosen = IAP(0.5, queries=8, recent=4, salient_min=0.25, salient_max=0.5)
    keep = chosen.keep_mask(seen, model.config)
    assert (keep.sum(-1) == 4).all()
    for layer, kept in zip(seen.layers, keep[0], strict=True):
        norms = torch.linalg.vector_norm(layer.keys[0, :, :-4], dim=1)  # [H, D]
        assert kept.gather(-1, norms.topk(2).indices).all()


def test_without_interaction_it_is_think():
    model, ids = tiny_model("qwen3"), torch.tensor(prompts([40, 40]))
    seen = prefill(model, ids, None, 0, 8)
    think = ThinK(0.6, 8).keep_mask(seen, model.config)
    assert torch.equal(IAP(0.6, 8, recent=0, interaction=0.0, **OFF).keep_mask(seen, model.config), think)
    assert not torch.equal(IAP(0.6, 8, recent=0, **OFF).keep_mask(seen, model.config), think)


def test_recent_keys_do_not_count():
    model, (ids,) = tiny_model("llama"), prompts([40])
    seen, other = (prefill(model, torch.tensor([ids]), None, 0, 8) for _ in range(2))
    for layer in other.layers:
        layer.keys[:, :, -5:] *= 100
    assert torch.equal(
        IAP(0.5, 8, recent=5).keep_mask(seen, model.config), IAP(0.5, 8, recent=5).keep_mask(other, model.config)
    )
    assert not torch.equal(IAP(0.5, 8, 4).keep_mask(seen, model.config), IAP(0.5, 8, 4).keep_mask(other, model.config))
    whole = IAP(0.5, 8, recent=0).keep_mask(seen, model.config)
    for recent in (40, 46):  # a prompt of recent tokens alone is scored on them
        assert torch.equal(IAP(0.5, 8, recent=recent).keep_mask(seen, model.config), whole)


@pytest.fixture(scope="module")
def reference():
    """The reference model's config, and its passes over one RULER prompt of each of two tasks."""
    place = ModelConfig(dtype="float32", device="cpu")
    config, tokenizer = load_config(place)
    model, passes = load_model(place), []
    for task in ("niah_multikey_3", "vt"):
        row = Ruler(tasks=[task], lengths=[1024], samples=1).row(Cell(task, 1024, ()), "0", tokenizer, 0)
        passes.append(prefill(model, torch.tensor([encode(tokenizer, row).ids]), None, 0, 32))
    return config, passes


@pytest.mark.parametrize("ratio", [0.4, 0.7])
def test_reconstruction_error_is_below_thinks_in_every_layer(reference, ratio):
    """Figure 3: relative error of Q K^T on real queries and keys, mean over the heads of a layer."""
    config, passes = reference
    for seen in passes:
        found = {}
        for name, chosen in (("think", ThinK(ratio)), ("iap", IAP(ratio, recent=0, **OFF))):
            keep = chosen.keep_mask(seen, config)[0]
            assert (keep.sum(-1) == 64 - int(64 * ratio)).all()
            found[name] = []
            for layer, kept in zip(seen.layers, keep, strict=True):
                q, k = layer.queries[0].double().unflatten(0, (4, -1)), layer.keys[0].double()
                exact = [q[h] @ k[h].T for h in range(4)]
                off = [(q[h] * kept[h]) @ k[h].T - exact[h] for h in range(4)]
                found[name].append(sum((a.norm() / b.norm()).item() for a, b in zip(off, exact, strict=True)) / 4)
        assert all(a < b for a, b in zip(found["iap"], found["think"], strict=True))
