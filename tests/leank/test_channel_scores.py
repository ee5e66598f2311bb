"""Masks that need no training, and the means and scores behind them."""

import pytest
import torch

from leank.channel_scores import MeanScores, lowest_frequencies, query_key_scores, random_mask
from tests.conftest import tiny_model


def test_lowest_frequencies_keeps_whole_rotary_pairs():
    model = tiny_model("qwen2")
    mask = lowest_frequencies(model.config, 0.7)
    frequencies = model.model.rotary_emb.inv_freq  # [D / 2]
    kept = frequencies.argsort()[:1]  # int(4 * 0.3 + 0.5)
    assert mask.keep.shape == (2, 2, 8)
    assert mask.keep[1, 1].nonzero().flatten().tolist() == [int(kept), int(kept) + 4]
    assert lowest_frequencies(model.config, 0.0).pruning_ratio == 0


def test_random_mask_is_even_and_repeatable():
    mask = random_mask((2, 3, 16), 0.7, seed=5)
    assert (mask.channels_per_head == 5).all()
    assert torch.equal(mask.keep, random_mask((2, 3, 16), 0.7, seed=5).keep)
    assert not torch.equal(mask.keep, random_mask((2, 3, 16), 0.7, seed=6).keep)


def test_mean_scores_need_finite_samples():
    with pytest.raises(ValueError, match="no sample"):
        MeanScores().mask(0.5)
    broken = MeanScores()
    broken.add(torch.ones(1, 2, 2, 4))
    scores = torch.ones(1, 2, 2, 4)
    scores[0, 1, 0, 3] = torch.inf
    broken.add(scores)
    with pytest.raises(ValueError, match="samples holds NaN or infinite scores in 1 of 4 KV heads, such as layer 1"):
        broken.mask(0.5)


def test_scores_of_a_half_precision_model_do_not_overflow():
    queries, squares = torch.full((1, 4, 3, 2), 300.0, dtype=torch.float16), torch.ones(1, 2, 2)
    assert query_key_scores(queries, squares, "squares").tolist() == [[[3 * 300.0**2] * 2] * 2]
