"""Pairs of channels are those that each model turns: seen from its keys, of one token at many positions."""

import pytest
import torch
from transformers import CohereConfig, Gemma3TextConfig, LlamaConfig, PhiConfig

from leank.channel_scores import lowest_frequencies
from leank.rotary import mean_by_pair, rotary_pairs, rotates_halves
from leank_train.forward.branching import prefill
from tests.helpers.families import build, trained

UNTURNED = ("cohere2", "exaone4")  # their first layer, of full attention, has no rotary positions


@pytest.mark.parametrize("name", [name for name in trained() if name not in UNTURNED])
def test_pairs_are_those_that_the_model_turns(name):
    """Equal tokens have equal keys before RoPE, so after it a pair keeps its length and other channels do not move."""
    model = build(name)
    keys = prefill(model, torch.full((1, 40), 7), [40]).keys[0][0]  # [H, positions, D]
    pairs = rotary_pairs(model.config)[0]
    still = (keys - keys[:, :1]).abs().amax((0, 1)) < 1e-6
    assert torch.equal(still, pairs < 0)
    turns = []
    for pair in range(int(pairs.max()) + 1):
        low, high = (pairs == pair).nonzero().flatten().tolist()
        turned = torch.complex(keys[..., low], keys[..., high])
        torch.testing.assert_close(turned.abs(), turned.abs()[:, :1].expand(turned.shape))
        step = turned[:, 1] / turned[:, 0]
        turns.append(step.angle().abs().mean().item())
        torch.testing.assert_close(step, step[:1].expand(step.shape))  # the same in every head
    assert turns == sorted(turns, reverse=True)
    if (pairs >= 0).all():
        kept = lowest_frequencies(model.config, 0.5).keep[0, 0]
        assert sorted(turns.index(turns[p]) for p in pairs[kept].unique()) == list(range(len(turns) // 2, len(turns)))


def test_a_mean_by_pair_is_a_loop_over_channels():
    values = torch.rand(2, 3, 8, dtype=torch.float64)
    pairs = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, -1, -1, -1, -1]])
    found = mean_by_pair(values, pairs)
    for layer, pair in ((0, 0), (0, 3), (1, 1)):
        of_pair = [values[layer, :, c].mean() for c in range(8) if pairs[layer, c] == pair]
        assert found[layer, pair] == pytest.approx(float(sum(of_pair) / 2))
    assert found[1, 2:].isnan().all()


def test_layers_with_rope_of_their_own():
    own = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(
        num_hidden_layers=2, head_dim=8, layer_types=["full_attention", "sliding_attention"], rope_parameters=own
    )
    assert rotary_pairs(config).tolist() == [[0, 1, 0, 1, -1, -1, -1, -1], [0, 1, 2, 3, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match="needs a model that rotates all channels"):
        lowest_frequencies(config, 0.5)
    assert not rotates_halves(config)
    assert [rotates_halves(one) for one in (LlamaConfig(), PhiConfig(), CohereConfig())] == [True, False, False]
