"""The bootstrap against redrawing samples one by one, and its symmetries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from leank import stats
from leank.stats import interval, intervals, mean

SCORES = st.lists(st.sampled_from([0.0, 25.0, 50.0, 75.0, 100.0]), min_size=1, max_size=12)


def one_by_one(strata, draws):
    """The definition: redraw every stratum at its own size, average the strata's means, take the quantiles."""
    rng = np.random.default_rng(1)
    means = [np.mean([rng.choice(stratum, len(stratum)).mean() for stratum in strata]) for _ in range(draws)]
    return np.quantile(means, [0.025, 0.975])


@pytest.mark.parametrize("sizes", [[40], [10, 60], [25, 25, 25]])
def test_the_interval_is_that_of_samples_redrawn_one_by_one(sizes):
    rng = np.random.default_rng(0)
    strata = [rng.integers(0, 5, n) * 25.0 for n in sizes]
    low, high = one_by_one(strata, 4000)
    assert interval(strata) == (pytest.approx(low, abs=(high - low) / 10), pytest.approx(high, abs=(high - low) / 10))


@hypothesis_settings(max_examples=10, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter_and_the_mean_lies_within(strata, shuffler):
    low, high = interval(strata)
    assert low <= mean(strata) + 1e-9
    assert high >= mean(strata) - 1e-9
    shuffled = [shuffler.sample(stratum, len(stratum)) for stratum in strata]
    assert interval(shuffled) == pytest.approx((low, high))
    assert interval([[x + 10 for x in stratum] for stratum in strata]) == pytest.approx((low + 10, high + 10))


def test_a_pair_that_differs_by_a_constant_has_no_width():
    assert interval([[5.0, 5.0], [3.0]]) == (4.0, 4.0)
    assert mean([[5.0, 5.0], [3.0]]) == 4.0


VALUES = st.lists(st.one_of(st.sampled_from([0.0, 100 / 3, 100.0]), st.floats(-1e9, 1e9)), min_size=1, max_size=9)


@hypothesis_settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(VALUES, min_size=1, max_size=4), max_size=8), st.sampled_from([1, 7, 64, 1 << 19]),
       st.integers(1, 3))  # fmt: skip
def test_intervals_that_share_resamples_are_those_of_each_alone(wanted, block, at_once):
    """Whatever stands beside it and however the work is cut."""
    plain = [interval(strata, draws=200) for strata in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "BLOCK", block)
        patch.setattr(stats, "TOGETHER", at_once)
        found = intervals(wanted, draws=200)
    for ends, expected, strata in zip(found, plain, wanted, strict=True):
        assert ends == pytest.approx(expected, rel=1e-9, abs=1e-9 * max(abs(x) for stratum in strata for x in stratum))


def test_strata_of_one_size_share_no_resamples_at_other_places():
    """Two strata of equal values vary less than one: if both were drawn alike, the interval would not narrow."""
    values = np.random.default_rng(2).normal(0, 1, 50)
    ((low, high), (low2, high2)) = intervals([[values], [values, values]])
    assert (high2 - low2) == pytest.approx((high - low) / np.sqrt(2), rel=0.1)


def test_nothing_to_resample_is_refused():
    with pytest.raises(ValueError, match="no strata"):
        interval([])
    with pytest.raises(ValueError, match="a stratum is empty"):
        interval([[1.0], []])
