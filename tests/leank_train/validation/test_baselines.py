"""Untrained masks against obvious loops over the samples of a tiny model."""

import pytest
import torch

from leank.channel_scores import MeanScores, lowest_frequencies, query_key_scores, random_mask
from leank_train.forward.branching import branch, prefill
from leank_train.validation.baselines import context_scores, think_mask
from tests.conftest import tiny_model


@pytest.fixture(scope="module")
def observed():
    """Two uneven documents with two branches each, the last six queries observed; and each sample's q and k alone."""
    model = tiny_model("llama")
    documents, questions = torch.randint(1, 50, (2, 12)), torch.randint(1, 50, (4, 5))
    lengths, question_lengths = [12, 9], [5, 2, 1, 4]
    prefix = prefill(model, documents, lengths, obs_queries=6)
    question = branch(model, prefix, questions, question_lengths, obs_queries=6)
    alone = []
    for r in range(4):
        whole = torch.cat([documents[r // 2, : lengths[r // 2]], questions[r, : question_lengths[r]]])
        one = prefill(model, whole[None], [len(whole)], obs_queries=6)
        alone.append([(q[0], k[0]) for q, k in zip(one.queries, one.keys, strict=True)])
    return prefix, question, alone


def test_think_s_masks_are_those_of_each_sample_alone(observed):
    prefix, question, alone = observed
    masks = think_mask(prefix, question, 0.4)
    assert masks.shape == (4, 2, 2, 8)
    for r, sample in enumerate(alone):
        for layer, (q, k) in enumerate(sample):
            for head in range(2):
                score = [0.0] * 8
                for c in range(8):
                    for member in (2 * head, 2 * head + 1):
                        score[c] += (q[member, :, c].square().mean() * k[head, :, c].square().mean()).item() / 2
                dropped = sorted(range(8), key=lambda c, score=score: score[c])[:3]  # int(0.4 * 8)
                assert (~masks[r, layer, head]).nonzero().flatten().tolist() == sorted(dropped)


def test_the_static_norm_is_a_mean_over_samples(observed):
    prefix, question, alone = observed
    norm = MeanScores()
    for _ in range(2):
        norm.add(context_scores(prefix, question, "norms"))
    expected = torch.zeros(2, 2, 8, dtype=torch.float64)
    for sample in alone:
        for layer, (q, k) in enumerate(sample):
            for head in range(2):
                for c in range(8):
                    for member in (2 * head, 2 * head + 1):
                        product = torch.outer(q[member, :, c], k[head, :, c])
                        expected[layer, head, c] += torch.linalg.matrix_norm(product) / 2 / 4
    torch.testing.assert_close(norm.scores, expected)
    keep = norm.mask(0.5)
    assert (keep.sum(-1) == 4).all()
    assert expected[keep].view(4, 4).amin(1).ge(expected[~keep].view(4, 4).amax(1)).all()
    assert norm.samples == 8


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


def test_bad_settings_are_named(observed):
    prefix, question, _ = observed
    with pytest.raises(ValueError, match="ratio=1"):
        think_mask(prefix, question, 1.0)
    with pytest.raises(ValueError, match="no queries"):
        think_mask(prefix, question.cut([1, 1, 1, 1]), 0.5)
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
