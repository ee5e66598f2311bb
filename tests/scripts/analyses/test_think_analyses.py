"""Sizes of channels, and singular values of attention, against whole matrices."""

import pytest
import torch

from scripts.analyses.think import UNIFORM, magnitudes, singular_energy
from tests.helpers.analysis_source import DIM, GROUP, HEADS, LENGTH, attention, only, prompt, qkv, source

TASK = "niah_single_2"


def test_sizes_of_channels():
    rows = magnitudes(source(), TASK, LENGTH, head=1)
    for layer, (_, k, v) in enumerate(qkv(prompt())):
        for part, held in (("K", k[::GROUP]), ("V", v[::GROUP])):
            mean = held.abs().sum(1) / held.shape[1]
            for channel in range(DIM):
                ordered = held[1, :, channel].abs().sort().values
                for name, wanted in (
                    ("mean", mean[1, channel]),
                    ("low", ordered.quantile(0.1)),
                    ("high", ordered.quantile(0.9)),
                ):
                    one = only(rows, measure=name, layer=layer, part=part, channel=channel)
                    assert one[0]["value"] == pytest.approx(wanted.item(), abs=1e-6)
            for head in range(HEADS):
                one = only(rows, measure="spread", layer=layer, part=part, head=head)
                assert one[0]["value"] == pytest.approx((mean[head].std() / mean[head].mean()).item(), abs=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_singular_values_of_attention(whole):
    """Of the whole matrix, with all queries or the last ones."""
    ids = prompt()
    queries = ids.shape[1] if whole else 64
    rows = singular_energy(source(), TASK, LENGTH, queries, ranks=10)
    weights = [attention(q, k)[:, -queries:] for q, k, _ in qkv(ids)]
    uniform = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.float64).tril()
    weights.append((uniform / uniform.sum(-1, keepdim=True))[None, -queries:])
    for name, matrix in zip([*map(str, range(len(weights) - 1)), UNIFORM], weights, strict=True):
        energy = torch.linalg.svdvals(matrix).square()
        energy = energy / energy.sum(-1, keepdim=True)
        for measure, wanted in (("energy", energy), ("cumulative", energy.cumsum(-1))):
            mine = [one["value"] for one in only(rows, measure=measure, of=name)]
            assert mine == pytest.approx(wanted.mean(0)[:10].tolist(), abs=1e-6)
        needed = [next(n for n, x in enumerate(one.cumsum(0).tolist(), 1) if x >= 0.9) for one in energy]
        assert only(rows, measure="rank", of=name)[0]["value"] == pytest.approx(sum(needed) / len(needed))
