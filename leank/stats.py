"""Means and bootstrap intervals of scores and of paired differences: every figure with an interval comes from here.

Methods are compared on the same samples. A difference is taken sample by sample first and then resampled, so that the
difficulty of a sample, which all methods share, cancels. A stratum holds the values of one task at one length; every
stratum is redrawn at its own size, and all strata count alike however many samples they hold.

The samples that are drawn depend on the seed, on a stratum's place and on its size alone. So all methods, and all
differences of two, share their resamples, and a report of many methods draws each of them once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS, LEVEL = 10_000, 0.95
DIGITS = 12  # of an interval's ends; beyond them lie the roundings of sums in another order
BLOCK = 1 << 19  # samples drawn at once
TOGETHER = 1 << 10  # intervals computed at once; DRAWS numbers of each are held

Strata = Sequence[ArrayLike]
Ends = tuple[float, float]
Values = NDArray[np.float64]
Picks = NDArray[np.int64]


def evenly(i: int) -> float:
    """Return the i-th of numbers that fill [0, 1) evenly, however many there are: multiples of the golden ratio."""
    return i * 0.6180339887498949 % 1


def interval(strata: Strata, draws: int = DRAWS, seed: int = 0) -> Ends:
    """Percentile bootstrap interval of the mean of the strata's means, at the level LEVEL.

    strata: arrays of values [n] in any order, none empty; draws: resamples, which the seed decides.
    Raises ValueError for no strata or an empty one.
    """
    return intervals([strata], draws, seed)[0]


def intervals(wanted: Iterable[Strata], draws: int = DRAWS, seed: int = 0) -> list[Ends]:
    """Compute `interval` of each of `wanted` at once; those whose strata have the same sizes share their resamples."""
    checked = [_checked(strata) for strata in wanted]
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)  # sizes of the strata -> which intervals
    for number, strata in enumerate(checked):
        alike[tuple(map(len, strata))].append(number)
    found: dict[int, Ends] = {}
    for sizes, numbers in alike.items():
        for start in range(0, len(numbers), TOGETHER):
            some = numbers[start : start + TOGETHER]
            found |= zip(some, _alike([checked[number] for number in some], sizes, draws, seed), strict=True)
    return [found[number] for number in range(len(checked))]


def _alike(wanted: Sequence[Sequence[Values]], sizes: Sequence[int], draws: int, seed: int) -> list[Ends]:
    """Compute intervals whose strata have these sizes: all means of some draws are one product of values and counts."""
    weights = np.repeat([1 / (size * len(sizes)) for size in sizes], sizes)
    values = np.stack([np.concatenate(strata) for strata in wanted]) * weights
    means = np.zeros((len(wanted), draws))
    for at, picks in _picks(sizes, draws, seed):
        counts = np.concatenate([_counts(of_stratum) for of_stratum in picks], axis=1)
        means[:, at : at + len(counts)] = values @ counts.T
    return _ends(means, wanted)


def _counts(picks: Picks) -> Values:
    """Return how often each draw picks each sample, [draws, samples], from the samples that it picks."""
    draws, size = picks.shape
    flat = picks + size * np.arange(draws)[:, None]
    return np.bincount(flat.ravel(), minlength=picks.size).reshape(draws, size).astype(float)


def mean(strata: Strata) -> float:
    """The mean of the strata's means, of which `interval` is the interval."""
    return float(np.mean([np.asarray(stratum, dtype=float).mean() for stratum in strata]))


def _checked(strata: Strata) -> list[Values]:
    """Return the strata as sorted arrays: samples are interchangeable, so their order must not matter."""
    if not len(strata):
        raise ValueError("no strata to resample: a bootstrap needs at least one sample")
    arrays = [np.sort(np.asarray(stratum, dtype=float)) for stratum in strata]
    if not all(map(len, arrays)):
        raise ValueError("a stratum is empty: a bootstrap needs at least one sample of each task and length")
    return arrays


def _picks(sizes: Sequence[int], draws: int, seed: int) -> Iterator[tuple[int, list[Picks]]]:
    """Yield the first draw of a block, and which samples its draws pick of each stratum: [draws of the block, size]."""
    streams = [np.random.default_rng((seed, place)) for place in range(len(sizes))]
    step = max(1, BLOCK // sum(sizes))
    for at in range(0, draws, step):
        block = min(step, draws - at)
        yield at, [rng.integers(size, size=(block, size)) for rng, size in zip(streams, sizes, strict=True)]


def _ends(means: Values, wanted: Sequence[Sequence[Values]]) -> list[Ends]:
    """Return the ends of the intervals of means [intervals, draws], rounded in units of their largest value."""
    found = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1, overwrite_input=True).T
    largest = np.array([[max(max(abs(values[0]), abs(values[-1])) for values in strata)] for strata in wanted])
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 1)
    return [(low, high) for low, high in (np.round(found / unit, DIGITS) * unit + 0.0).tolist()]
