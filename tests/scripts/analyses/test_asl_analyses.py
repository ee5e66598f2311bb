"""Ranks, their variance and selection layers: from whole attention matrices, and from ASL itself."""

import pytest
import torch

from leank.eval.methods.prefill.asl import ASL
from scripts.analyses.asl import ranks, relative_variance, selection_layers
from tests.helpers.analysis_source import LAYERS, LENGTH, attention, only, prompt, qkv, source

TASK, WINDOW, KERNEL, BUDGET = "niah_single_2", 16, 3, 80


def scores(ids):
    """Of every layer: the attention of the last queries to each token before them, summed over heads and pooled."""
    layers = []
    for q, k, _ in qkv(ids):
        given = attention(q, k)[:, -WINDOW:, :-WINDOW].sum((0, 1))
        around = torch.cat([given.new_zeros(1), given, given.new_zeros(1)])
        layers.append(torch.stack([around[i : i + KERNEL].sum() / KERNEL for i in range(len(given))]))
    return layers


def places(layer):
    return [1 + int((layer > score).sum()) for score in layer]


def variance(places, k):
    """The mean over tokens among the first k anywhere of the variance of their ranks."""
    tokens = [t for t in range(len(places[0])) if any(layer[t] <= k for layer in places)]
    each = [[layer[t] for layer in places] for t in tokens]
    return sum(sum((x - sum(one) / len(one)) ** 2 for x in one) / len(one) for one in each) / len(each)


def test_relative_variances():
    rows = relative_variance(source(), (TASK,), LENGTH, 1, BUDGET, WINDOW, KERNEL, observed=(2, 3), firsts=(1,))
    found_ranks = [places(layer) for layer in scores(prompt())]
    for observed in (2, 3):
        found = [variance(found_ranks[max(0, layer + 1 - observed) : layer + 1], BUDGET - WINDOW) for layer in (1, 2)]
        mine = [one["value"] for one in only(rows, observed=observed)]
        assert mine == pytest.approx([1, found[1] / found[0]], abs=1e-6)
    assert [one["layer"] for one in only(rows)] == [1, 2] * 2


@pytest.mark.parametrize("tau", [0.3, 0.9, 0.999])
def test_the_selection_layer_is_where_asl_drops_tokens(tau):
    found = source()
    rows = selection_layers(found, (TASK,), LENGTH, 3, (tau,), BUDGET, WINDOW, KERNEL, observed=2, first=1)
    selected, whole = (
        [one["value"] for one in only(rows, measure=name)] for name in ("selection_layer", "whole_layers")
    )
    assert whole == [LAYERS if layer is None else layer + 1 for layer in selected]
    for one in only(rows, measure="selection_layer"):
        passed = ASL(BUDGET, tau, WINDOW, KERNEL, 2, 1).row(found.model, prompt(one["sample"]), 0, 0)
        dropped = [index for index, layer in enumerate(passed.layers) if layer.kept is not None]
        if dropped:
            assert one["value"] == dropped[0] - 1
        else:  # nothing is above the last layer
            assert one["value"] in (None, LAYERS - 1)


def test_ranks_and_places():
    rows = ranks(source(), (TASK,), LENGTH, top=20, bins=5, window=WINDOW, kernel=KERNEL)
    found = scores(prompt())
    tokens, preferred = len(found[0]), found[-1].topk(20).indices
    for layer, score in enumerate(found):
        share = score / score.sum()
        binned = [sum(share[t] for t in range(tokens) if t * 5 // tokens == number).item() for number in range(5)]
        mine = [one["value"] for one in only(rows, measure="attention", layer=layer)]
        assert mine == pytest.approx(binned, abs=1e-6)
        top = only(rows, measure="top_share", layer=layer)[0]["value"]
        assert top == pytest.approx(sum(sorted(share.tolist())[-20:]), abs=1e-6)
        median = torch.tensor(places(score)).double()[preferred].quantile(0.5).item() / tokens
        assert only(rows, measure="rank", layer=layer, quantile=0.5)[0]["value"] == pytest.approx(median)


def test_a_budget_that_holds_the_prompt_is_refused():
    with pytest.raises(ValueError, match="budget=1024 holds all"):
        relative_variance(source(), (TASK,), LENGTH, 1, budget=1024)
