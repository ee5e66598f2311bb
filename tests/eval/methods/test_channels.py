"""Methods that prune channels of K: scores against slow forms, and what the papers say of IAP."""

import copy
import importlib.util
import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.channel_scores import lowest_frequencies
from leank.eval.cache.attention.softmax import Softmax
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import pad_left, prefill
from leank.eval.methods import Method, build_method
from leank.eval.methods.channels.by_length import ByLength
from leank.eval.methods.channels.double_sparsity_channels import DoubleSparsityChannels
from leank.eval.methods.channels.iap import IAP, greedy, interactions, salient
from leank.eval.methods.channels.leank_budget import LeanKBudget
from leank.eval.methods.channels.magnitude import Magnitude
from leank.eval.methods.channels.static_norm import StaticNorm
from leank.eval.methods.channels.think import ThinK, value_scores
from leank.eval.methods.common.observed import seen
from leank.mask import ChannelMask
from tests import DATA
from tests.helpers import kvpress
from tests.helpers.cache_oracle import random_keep, tiny_model
from tests.helpers.replay_tools import prompts

QUERIES, LENGTHS = 5, [31, 9, 40]
LOWEST = {"name": "lowest_frequencies", "ratio": 0.5}
CHOICES = {
    "think": ThinK(0.6, QUERIES, values=0.3),
    "think norms": ThinK(0.6, QUERIES, "norms", values=0.5),
    "iap": IAP(0.5, QUERIES, recent=3, salient_max=0.2),
    "l1": Magnitude(0.6, 1),
    "l2": Magnitude(0.6, 2),
    "budget": LeanKBudget(ChannelMask(random_keep(0)), QUERIES),
    "by length": ByLength(LOWEST, {"name": "think", "ratio": 0.6, "queries": QUERIES, "values": 0.3}, at=31),
}


def dropping(seen_prefill, seed):
    """The same pass with random tokens dropped, per head."""
    generator = torch.Generator().manual_seed(seed)
    selected = []
    for layer in seen_prefill.layers:
        stays = torch.rand(layer.keys.shape[:3], generator=generator) < 0.6
        stays[..., -QUERIES:] = True
        real = layer.real(seen_prefill.real)
        selected.append(stays if real is None else stays & real[:, None])
    return replace(seen_prefill, selected=selected)


def passes(family="llama"):
    """The model, a padded batch's pass with tokens dropped, and each row's own pass with the same tokens dropped."""
    model, ids = tiny_model(family), prompts(LENGTHS)
    padded, real = pad_left(ids, 0, "cpu")
    batch = dropping(prefill(model, padded, real, 0, QUERIES), seed=1)
    alone = []
    for row, prompt in enumerate(ids):
        one = prefill(model, torch.tensor([prompt]), None, 0, QUERIES)
        selected = [stays[row : row + 1, :, -len(prompt) :] for stays in batch.selected]
        alone.append(replace(one, selected=selected))
    return model, batch, alone


@pytest.fixture(scope="module")
def observed():
    return passes()


@pytest.mark.parametrize("label", CHOICES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_of_a_padded_batch_choose_as_alone(family, label):
    """Where all tokens stay; where some are dropped, the tests below compare each prompt alone."""
    model, batch, alone = passes(family)
    batch, alone = replace(batch, selected=None), [replace(one, selected=None) for one in alone]
    choice = CHOICES[label]
    for choose in (choice.keep_mask, choice.keep_value_mask):
        together, apart = choose(batch, model.config), [choose(one, model.config) for one in alone]
        if together is None:
            assert apart == [None] * len(alone)
        else:
            assert torch.equal(together, torch.cat(apart))


def held(one, layer, head):
    """(queries [2, n, 8] of a KV head's members, K [T, 8] and V [T, 8] of the tokens that stay) of a prompt alone."""
    dense, stays = one.layers[layer], one.selected[layer][0, head]
    return dense.queries[0, 2 * head : 2 * head + 2], dense.keys[0, head, stays], dense.values[0, head, stays]


def think_by_hand(power):
    """Of each channel ||Q_m[:, j] K[:, j]^T||_F of each member m, to a power, added up."""
    return lambda q, k: sum(torch.stack([torch.outer(m[:, j], k[:, j]).norm() for j in range(8)]) ** power for m in q)


KEPT = {  # label of a choice -> scores of a head's channels by hand, channels kept of each head [L, H]
    "think": (think_by_hand(2), torch.full((2, 2), 4)),  # of 8 channels, floor(0.6 * 8) go
    "think norms": (think_by_hand(1), torch.full((2, 2), 4)),
    "l1": (lambda q, k: k.abs().sum(0), torch.full((2, 2), 4)),
    "l2": (lambda q, k: k.square().sum(0), torch.full((2, 2), 4)),
    "budget": (think_by_hand(2), random_keep(0).sum(-1)),
}


@pytest.mark.parametrize("label", KEPT)
def test_the_channels_of_the_highest_scores_by_hand_stay(observed, label):
    """Of the tokens that stay alone; of a mask's budget as many as it has in each head."""
    model, batch, alone = observed
    by_hand, counts = KEPT[label]
    keep = CHOICES[label].keep_mask(batch, model.config)
    for row, layer, head in itertools.product(range(3), range(2), range(2)):
        q, k, _ = held(alone[row], layer, head)
        best = by_hand(q, k).topk(int(counts[layer, head])).indices.sort().values
        assert torch.equal(keep[row, layer, head].nonzero().flatten(), best)


@pytest.mark.parametrize(("group", "power"), [("norms", 1), ("squares", 2)])
def test_thinks_values_against_the_whole_attention(observed, group, power):
    """Eq. 3, query by query, over what each may see."""
    _, batch, alone = observed
    for layer, found in enumerate(seen(batch, QUERIES)):
        scores = value_scores(found, QUERIES, group)
        for row, head in itertools.product(range(3), range(2)):
            queries, k, v = held(alone[row], layer, head)  # the observed tokens all stay, as the last ones
            by_hand = torch.zeros(8, dtype=torch.float64)
            for member in queries:
                outputs = []
                for n, q in enumerate(member, len(k) - QUERIES + 1):  # n tokens are seen
                    outputs.append(torch.softmax(k[:n] @ q / 8**0.5, 0) @ v[:n])
                by_hand += torch.stack(outputs).norm(dim=0) ** power / 2
            torch.testing.assert_close(scores[row, head], by_hand)


def test_a_query_that_sees_no_token_adds_nothing_to_values():
    """Of each prompt the last token alone stays, which the queries before it do not see."""
    _, batch, _ = passes()
    last = [torch.zeros_like(layer.keys[..., 0], dtype=torch.bool) for layer in batch.layers]
    for stays in last:
        stays[..., -1] = True
    for layer, found in zip(batch.layers, seen(replace(batch, selected=last), QUERIES), strict=True):
        torch.testing.assert_close(value_scores(found, QUERIES, "norms"), layer.values[:, :, -1].abs())


def test_values_are_scored_by_the_models_own_softmax(observed):
    """Its factor of the logits and its cap."""
    _, batch, _ = observed
    (layer, *_), (first, *_) = batch.layers, seen(batch, QUERIES)
    before = value_scores(first, QUERIES, "norms")
    other = copy.copy(layer)
    other.scaling, other.softmax = 2 * layer.keys.shape[-1] ** -0.5, Softmax(softcap=10**6)
    doubled = first._replace(layer=copy.copy(layer))
    doubled.layer.queries = 2 * layer.queries
    found = value_scores(first._replace(layer=other), QUERIES, "norms")
    torch.testing.assert_close(found, value_scores(doubled, QUERIES, "norms"))
    assert not torch.allclose(found, before)


def test_values_are_pruned_by_their_own_ratio(observed):
    model, batch, _ = observed
    assert (CHOICES["think"].keep_value_mask(batch, model.config).sum(-1) == 6).all()
    assert ThinK(0.6, QUERIES).keep_value_mask(batch, model.config) is None


def test_a_budget_is_known_by_its_mask_and_settings():
    mask = ChannelMask(random_keep(0))
    made = [LeanKBudget(mask, 5), LeanKBudget(mask, 6), LeanKBudget(ChannelMask(random_keep(1)), 5)]
    assert len({json.dumps(Method("budget", one).config()) for one in made}) == 3


def test_by_length_tells_the_rows_apart(observed):
    model, batch, alone = observed
    made, above = CHOICES["by length"], ThinK(0.6, QUERIES, values=0.3)
    keep, values = made.keep_mask(batch, model.config), made.keep_value_mask(batch, model.config)
    for row in (0, 1):  # the third prompt alone has more than 31 tokens
        assert torch.equal(keep[row], lowest_frequencies(model.config, 0.5).keep)
        assert values[row].all()
    assert torch.equal(keep[2:], above.keep_mask(alone[2], model.config))
    assert torch.equal(values[2:], above.keep_value_mask(alone[2], model.config))
    assert made.obs_queries == QUERIES


def test_by_length_of_two_masks_and_what_it_is_known_by(tmp_path):
    for seed, name in enumerate("ab"):
        ChannelMask(random_keep(seed)).save(tmp_path / f"{name}.safetensors")
    sides = {
        side: {"name": "leank", "mask": str(tmp_path / f"{n}.safetensors")}
        for side, n in (("below", "a"), ("above", "b"))
    }
    model = tiny_model("llama")
    padded, real = pad_left(prompts(LENGTHS), 0, "cpu")
    made = build_method("qwen", {"channels": {"name": "by_length", "at": 31, **sides}})
    made.channels.check(model.config, None)
    keep = made.channels.keep_mask(prefill(model, padded, real, 0), model.config)
    assert torch.equal(keep, torch.stack([random_keep(0), random_keep(0), random_keep(1)]))
    longer = build_method("qwen", {"channels": {"name": "by_length", "at": 32, **sides}})
    swapped = build_method(
        "qwen", {"channels": {"name": "by_length", "below": sides["above"], "above": sides["below"]}}
    )
    assert len({json.dumps(m.config()) for m in (made, longer, swapped)}) == 3


def calibrated(choice, lengths=(17, 23, 30)):
    """`choice` calibrated on random prompts in place of its samples, and their passes with all queries."""
    model, (_, tokenizer) = tiny_model("llama"), load_config(ModelConfig())
    ids = [torch.tensor([one]) for one in prompts(lengths)]
    coming = iter(ids)
    choice.calibrate(lambda sample, queries: prefill(model, next(coming), None, 0, queries), tokenizer, model.config)
    return choice.keep_mask(None, model.config), [prefill(model, one, None, 0, one.shape[1]) for one in ids]


OBSERVED = {"samples": 3, "queries": QUERIES}
MEANS = {  # a choice; what it averages over samples and the heads of a group, of all queries q and keys k of a head
    "double sparsity": (DoubleSparsityChannels(0.6, length=512, samples=3), lambda q, k: (q * k).abs().mean(0)),
    "static norm": (StaticNorm(0.6, **OBSERVED), lambda q, k: think_by_hand(1)([q[-QUERIES:]], k)),
    "relative": (StaticNorm(0.6, **OBSERVED, relative=True),
                 lambda q, k: think_by_hand(1)([q[-QUERIES:]], k) / (q[-QUERIES:] @ k.T).norm()),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_the_channels_of_the_largest_mean_over_samples_stay(name):
    choice, of_head = MEANS[name]
    keep, samples = calibrated(choice)
    for layer, head in itertools.product(range(2), range(2)):
        held = [sample.layers[layer] for sample in samples]
        means = sum(of_head(one.queries[0, m], one.keys[0, head]) for one in held for m in (2 * head, 2 * head + 1))
        assert torch.equal(keep[layer, head].nonzero().flatten(), means.topk(4).indices.sort().values)


def test_a_copy_with_another_ratio_shares_the_samples_and_one_with_other_samples_does_not():
    choice = StaticNorm(0.6, samples=3, queries=QUERIES)
    keep, _ = calibrated(choice)
    more = replace(choice, ratio=0.3)
    more.calibrate(None, None, None)  # nothing is left to read
    assert (keep & ~more.keep_mask(None, None)).sum() == 0
    for other in (replace(choice, seed=8), replace(choice, queries=QUERIES + 1), StaticNorm(0.6)):
        with pytest.raises(RuntimeError, match="must be calibrated before it is used"):
            other.keep_mask(None, None)


@pytest.mark.parametrize("ratio", kvpress.RATIOS)
@pytest.mark.parametrize("family", kvpress.FAMILIES)
def test_think_is_kvpress(family, ratio):
    """Choices of kvpress 0.5.5, recorded by tests/helpers/kvpress.py; made anew where kvpress is installed."""
    found = json.loads((DATA / "kvpress_think.json").read_text())
    if importlib.util.find_spec("kvpress"):
        assert kvpress.think() == found
    model = kvpress.random_model(family)
    passed = prefill(model, kvpress.prompt(), None, 0, kvpress.WINDOW)
    keep = ThinK(ratio, kvpress.WINDOW).keep_mask(passed, model.config)[0]
    assert [[(~kept).nonzero().flatten().tolist() for kept in layer] for layer in keep] == found[family][str(ratio)]


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
