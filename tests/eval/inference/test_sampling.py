"""Tokens are drawn from the distribution that the settings describe, by numbers that depend on nothing else."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.inference.sampling import Draws, Sampling, probabilities, uniforms
from leank.typed import BadConfig
from tests.helpers.cache_oracle import tiny_model

SETTINGS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 0.999) | st.just(1.0),
    top_k=st.integers(0, 40),
)


def described(logits, sampling):
    """{token: probability}, one sum after the other."""
    hot = [logit / sampling.temperature for logit in logits]
    order = sorted(range(len(hot)), key=lambda token: (-hot[token], token))
    if sampling.top_k:
        order = [token for token in order if hot[token] >= hot[order[: sampling.top_k][-1]]]
    weights = {token: math.exp(hot[token] - hot[order[0]]) for token in order}
    total, kept, reached = sum(weights.values()), {}, 0.0
    for token in order:
        if reached < sampling.top_p:
            kept[token] = weights[token]
            reached += weights[token] / total
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), SETTINGS)
def test_shares_of_tokens_are_those_of_softmax_with_top_k_and_top_p(seed, sampling):
    """Of 1,000 numbers at equal distances each token gets its share of them, to within one."""
    model = tiny_model("llama")
    ids = torch.randint(2, 89, (1, 5), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    wanted = described(logits.tolist(), sampling)
    found = probabilities(logits[None], sampling)[0]
    found /= found.sum()
    assert found.tolist() == pytest.approx([wanted.get(token, 0.0) for token in range(89)])
    assert set((found > 1e-300).nonzero().flatten().tolist()) == {t for t, share in wanted.items() if share > 1e-300}
    numbers = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    counts = np.bincount(Draws(sampling, numbers).tokens(logits.expand(1000, -1), 0), minlength=89)
    assert all(abs(count - 1000 * wanted.get(token, 0)) <= 1 + 1e-6 for token, count in enumerate(counts))


def test_numbers_at_the_ends_draw_tokens_that_are_possible():
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])
    for number, token in ((0.0, 1), (float(np.nextafter(1, 0)), 2)):
        draws = Draws(Sampling(1.0), torch.tensor([[number]], dtype=torch.float64))
        assert draws.tokens(logits, 0).tolist() == [token]
    bad = Draws(Sampling(1.0), torch.full((2, 1), 0.5, dtype=torch.float64))
    assert bad.tokens(torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0]]), 0).max() < 3  # of the row's end, any


def test_a_number_depends_on_seed_prompt_reply_and_step_alone():
    whole = uniforms(1, [5, 6], 0, 100)
    assert (uniforms(1, [5, 6], 0, 7) == whole[:7]).all()
    assert 0 <= whole.min() < whole.max() < 1
    for other in (uniforms(2, [5, 6], 0, 100), uniforms(1, [56], 0, 100), uniforms(1, [5, 6], 1, 100)):
        assert not (other == whole).any()
    assert whole[:2].tolist() == pytest.approx([0.865316130054, 0.048949249631])  # on every machine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replies": 8}, "replies=8 has no effect while temperature=0"),
        ({"top_p": 0.9}, r"top_p=0\.9 has no effect while temperature=0"),
        ({"top_k": 20}, "top_k=20 has no effect while temperature=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0"),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(given, message):
    with pytest.raises(BadConfig, match=message):
        Sampling(**given)
