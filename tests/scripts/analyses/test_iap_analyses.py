"""Interaction terms, spread of queries and errors per layer against whole matrices."""

import pytest
import torch

from leank.eval.methods.channels.iap import IAP
from leank.eval.methods.channels.think import ThinK
from scripts.analyses.iap import interaction, layer_error, query_spread
from tests.helpers.analysis_source import DIM, GROUP, HEADS, LAYERS, LENGTH, attention, only, prompt, qkv, source

TASK, QUERIES = "niah_single_2", 16


def terms(q, k, head):
    """M_ij of one KV head, channel by channel, summed over the query heads of its group."""
    matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
    for member in range(head * GROUP, (head + 1) * GROUP):
        for i in range(DIM):
            for j in range(DIM):
                matrix[i, j] += (k[member, :, i] @ k[member, :, j]) * (
                    q[member, -QUERIES:, i] @ q[member, -QUERIES:, j]
                )
    return matrix


def test_interactions_and_their_shares():
    rows = interaction(source(), TASK, LENGTH, samples=1, queries=QUERIES, head=1)
    for layer, (q, k, _) in enumerate(qkv(prompt())):
        matrices = [terms(q, k, head) for head in range(HEADS)]
        for one in only(rows, measure="interaction", layer=layer):
            wanted = matrices[1][one["channel"], one["other"]] / matrices[1].abs().max()
            assert one["value"] == pytest.approx(wanted.item(), abs=1e-6)
        upper = [(i, j) for i in range(DIM) for j in range(i, DIM)]
        off, extreme, held = 0.0, 0.0, 0.0
        for m in (matrix.abs() for matrix in matrices):
            outside = m - m.diag().diag()
            off += (outside.sum() / m.sum()).item() / HEADS
            largest = sorted(upper, key=lambda ij, m=m: -m[ij])[:DIM]
            extreme += sum(i != j for i, j in largest) / DIM / HEADS
            held += (outside.sum(0).max() / outside.sum()).item() / HEADS  # a tenth of 8 channels: one
        for name, wanted in (("off_diagonal", off), ("extreme", extreme), ("concentrated", held)):
            assert only(rows, measure=name, layer=layer)[0]["value"] == pytest.approx(wanted, abs=1e-6)
    assert len(only(rows, measure="interaction")) == LAYERS * DIM * (DIM + 1) // 2


def test_spread_of_queries():
    rows = query_spread(source(), TASK, LENGTH, QUERIES, head=2)
    for layer, (q, _, _) in enumerate(qkv(prompt())):
        last = q[:, -QUERIES:]
        for name, wanted in (("mean", last[2].mean(0)), ("deviation", last[2].std(0))):
            assert [one["value"] for one in only(rows, measure=name, layer=layer)] == pytest.approx(wanted.tolist())
        unsteady = (last.std(1) > last.mean(1).abs()).double().mean().item()
        assert only(rows, measure="unsteady", layer=layer)[0]["value"] == pytest.approx(unsteady)


def test_errors_of_pruned_layers():
    found, ratio = source(), 0.5
    rows = layer_error(found, TASK, LENGTH, samples=1, ratios=(ratio,), queries=QUERIES)
    seen = found.observe(prompt(), QUERIES)
    for name, rule in (("ThinK", ThinK(ratio, QUERIES)), ("IAP", IAP(ratio, QUERIES))):
        keep = rule.keep_mask(seen, found.config)[0].repeat_interleave(GROUP, 1)[:, :, None]  # [L, Hq, 1, D]
        for layer, (q, k, v) in enumerate(qkv(prompt())):
            last, cut = q[:, -QUERIES:], k * keep[layer]
            logits = ((last @ k.mT - last @ cut.mT).norm() / (last @ k.mT).norm()).item()
            full, pruned = ((attention(q, keys) @ v)[:, -QUERIES:] for keys in (k, cut))
            for measure, wanted in (("logits", logits), ("outputs", ((full - pruned).norm() / full.norm()).item())):
                one = only(rows, measure=measure, method=name, layer=layer)
                assert one[0]["value"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("measure", [interaction, query_spread])
def test_layers_that_the_model_lacks_are_refused(measure):
    with pytest.raises(ValueError, match="layers 0 to 2, not 7"):
        measure(source(), layers=[7])
