"""Empty heads, counted in masks; the published one for Qwen shows the paper's figure."""

import pytest

from leank.channel_scores import lowest_frequencies
from leank.eval.methods.tokens.duo_attention import high_frequency_ratio
from leank.mask import ChannelMask
from scripts.analyses.leank import empty_heads
from scripts.analyses.source import Source
from tests import ROOT
from tests.helpers.analysis_source import HEADS, LAYERS, LENGTH, only, random_mask, source


def test_counts_of_a_mask():
    mask = random_mask()
    rows = empty_heads(Source(mask=mask), first=1)
    for one in only(rows, measure="kept"):
        assert one["value"] == sum(mask.keep[one["layer"], one["head"]].tolist())
    assert [one["value"] for one in only(rows, measure="empty")] == [1, *[0] * (LAYERS - 1), 1]
    assert only(rows, measure="empty_in_first")[0]["value"] == 1


def test_a_mask_without_empty_heads_has_no_share():
    mask = ChannelMask(random_mask().keep | True)
    assert only(empty_heads(Source(mask=mask)), measure="empty_in_first")[0]["value"] is None


def test_high_frequencies_of_empty_heads():
    found = source(mask=True)
    rows = only(empty_heads(found, task="niah_multikey_1", length=LENGTH), measure="w_hf")
    prompt = found.observe(found.ids(found.sample("niah_multikey_1", LENGTH, 0)), 32)
    ratio = high_frequency_ratio(prompt, ~lowest_frequencies(found.config, 0.5).keep, 32)
    empty = ratio[0, 1].item()
    assert [one["value"] for one in rows] == pytest.approx([empty, (ratio.sum().item() - empty) / (LAYERS * HEADS - 1)])


def test_the_published_mask_of_qwen():
    """Appendix M: 43% of the empty heads lie in the first five layers."""
    mask = ChannelMask.from_official(ROOT / "leank_train/assets/masks/published/qwen2.5-7b-instruct.pth")
    rows = empty_heads(Source(mask=mask))
    assert only(rows, measure="empty", layer=None)[0]["value"] == 35
    assert only(rows, measure="empty_in_first")[0]["value"] == pytest.approx(0.43, abs=0.005)
