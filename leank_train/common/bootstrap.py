"""Bootstrap intervals of scores and of paired differences: every figure with an interval comes from here.

Methods are compared on the same samples. A difference is taken sample by sample first and then resampled, so that the
difficulty of a sample, which all methods share, cancels. A stratum holds the values of one task at one length; every
stratum is redrawn at its own size, and all strata count alike however many samples they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

DRAWS, LEVEL = 10_000, 0.95


def interval(strata: Sequence[ArrayLike], draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of the strata's means, at the level LEVEL.

    Samples with the same value are interchangeable, so the number of times that each distinct value is drawn is drawn
    at once. That follows the same distribution as drawing the samples one by one, and recall has few distinct values.

    strata: one-dimensional arrays of values, at least one, none of them empty. draws: bootstrap resamples. seed: of
    the random generator; the same strata give the same interval.
    Raises ValueError for no strata or an empty one.
    """
    if not len(strata):
        raise ValueError("no strata to resample: a bootstrap needs at least one sample")
    rng, means = np.random.default_rng(seed), np.zeros(draws)
    for stratum in strata:
        values, counts = np.unique(np.asarray(stratum, dtype=float), return_counts=True)
        if not len(values):
            raise ValueError("a stratum is empty: a bootstrap needs at least one sample of each task and length")
        size = counts.sum()
        means += rng.multinomial(size, counts / size, size=draws) @ values / size
    low, high = np.quantile(means / len(strata), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean(strata: Sequence[ArrayLike]) -> float:
    """The mean of the strata's means, of which `interval` is the interval."""
    return float(np.mean([np.asarray(stratum, dtype=float).mean() for stratum in strata]))
