"""Kept shares per RoPE pair, counted one channel at a time; the published masks show the papers' peaks."""

import pytest
import torch

from leank.mask import ChannelMask
from scripts.analyses.leank import kept_by_pair
from scripts.analyses.source import Source
from tests import ROOT
from tests.helpers.analysis_source import LENGTH, only, random_mask, source


def test_shares_of_a_mask():
    mask = random_mask()
    layers, heads, dim = mask.keep.shape
    rows = only(kept_by_pair(Source(mask=mask)))
    assert len(rows) == (layers + 1) * dim // 2
    for one in rows:
        where = range(layers) if one["layer"] is None else [one["layer"]]
        pair = one["pair"]
        kept = [mask.keep[i, j, c].item() for i in where for j in range(heads) for c in (pair, pair + dim // 2)]
        assert one["value"] == pytest.approx(sum(kept) / len(kept))


def test_a_model_adds_think_at_the_masks_ratio():
    found = source(mask=True)
    rows = kept_by_pair(found, "niah_multikey_1", LENGTH, samples=1)
    of_think = [one["value"] for one in only(rows, method="ThinK", layer=None)]
    dim = found.need_mask().keep.shape[-1]
    kept = dim - int(found.need_mask().pruning_ratio * dim)  # equally many in every head
    assert sum(of_think) / len(of_think) == pytest.approx(kept / dim)


@pytest.mark.parametrize(("name", "peak"), [("llama3.1-8b", 22), ("qwen2.5-7b", 31)])
def test_published_masks_peak_where_the_paper_says(name, peak):
    """Section 5.1: among the high-frequency half, pair 22 of Llama and pair 31 of Qwen stand out."""
    mask = ChannelMask.from_official(ROOT / f"leank_train/assets/masks/published/{name}-instruct.pth")
    rows = only(kept_by_pair(Source(mask=mask)), layer=None)
    shares = torch.tensor([one["value"] for one in rows])
    assert int(shares[: len(shares) // 2].argmax()) == peak
    assert shares[len(shares) // 2 :].mean() > 2 * shares[: len(shares) // 2].mean()
