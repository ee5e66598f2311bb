"""Whether a paper's claim shows in the rows made here: a mean with its 95% interval, and one sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from eval.papers.item import Contrast, Expect, Row
from eval.report.groups import which
from eval.rows.result_row import ResultRow
from leank_train.common.bootstrap import interval, mean

Verdict = Literal["shows", "contradicts", "undecided", "not compared"]
WORDS = {
    "score": "points", "bytes": "times the cache bytes", "first_token": "times the time to the first token",
    "per_token": "times the time per token",
}  # fmt: skip
SAID = {
    "shows": "The claim shows here.",
    "contradicts": "This contradicts the paper.",
    "undecided": "These samples do not decide.",
    "not compared": "There is nothing to compare yet.",
}
FEW = 10  # samples of a comparison of methods; fewer decide nothing, whatever their interval


@dataclass(frozen=True)
class Judgement:
    """What the rows say of one comparison.

    sentence: the figures and what follows from them.
    verdict: whether the claim shows.
    """

    sentence: str
    verdict: Verdict


def contrast(claim: Contrast, rows: Sequence[ResultRow]) -> Judgement:
    """Compare two methods sample by sample; tasks and lengths count alike."""
    strata: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    other = {(r["task"], r["length"], *which(r)): r for r in rows if r["method"] == claim.second}
    for row in rows:
        against = other.get((row["task"], row["length"], *which(row)))
        if row["method"] == claim.first and against is not None:
            value = _compared(claim, row, against)
            if value is not None:
                strata[row["task"], row["length"]].append(value)
    names = f"{claim.first} minus {claim.second}" if claim.measure == "score" else f"{claim.first} / {claim.second}"
    return _judged(names, WORDS[claim.measure], list(strata.values()), claim.bound, claim.measure == "score")


def expect(claim: Expect, rows: Sequence[Row]) -> Judgement:
    """Judge the mean value of some rows of an analysis, or the difference of two such means."""
    if claim.by:
        return _judged(f"{claim.says}, difference", "", [_pairs(claim, rows)], claim.bound, True)
    first, second = _values(claim.of, rows), _values(claim.minus, rows) if claim.minus is not None else [0.0]
    name = claim.says if claim.minus is None else f"{claim.says}, difference"
    if not first or not second:
        return Judgement(f"{name}: {SAID['not compared']}", "not compared")
    of, minus = mean([first]), mean([second])
    (a, b), (c, d) = interval([first]), interval([second], seed=1)
    # two independent means: their distances to the ends add up in quadrature
    low, high = of - minus - math.hypot(of - a, d - minus), of - minus + math.hypot(b - of, minus - c)
    count = len(first) + (0 if claim.minus is None else len(second))
    return _sentence(name, "", (of - minus, low, high), count, claim.bound, True)


def _compared(claim: Contrast, row: ResultRow, against: ResultRow) -> float | None:
    if claim.measure == "score":
        return 100 * (row["score"] - against["score"])
    if claim.measure == "bytes":
        return row["cache_bytes"]["total"] / against["cache_bytes"]["total"]
    ours, theirs = row["seconds"].get(claim.measure), against["seconds"].get(claim.measure)
    return ours / theirs if ours and theirs else None


def _values(counts: Callable[[Row], bool], rows: Sequence[Row]) -> list[float]:
    return [float(value) for row in rows if counts(row) and (value := row.get("value")) is not None]


def _pairs(claim: Expect, rows: Sequence[Row]) -> list[float]:
    """Differences of the rows that agree in the fields by which they are paired."""
    assert claim.minus is not None
    of, minus = (
        {tuple(row[name] for name in claim.by): float(value)
         for row in rows if counts(row) and (value := row.get("value")) is not None}
        for counts in (claim.of, claim.minus)
    )  # fmt: skip
    return [of[key] - minus[key] for key in of if key in minus]


def _judged(name: str, unit: str, strata: list[list[float]], bound: float, above: bool) -> Judgement:
    if not any(strata):
        return Judgement(f"{name}: {SAID['not compared']}", "not compared")
    figures = (mean(strata), *interval(strata))
    return _sentence(name, unit, figures, sum(map(len, strata)), bound, above)


def _sentence(
    name: str, unit: str, figures: tuple[float, float, float], count: int, bound: float, above: bool
) -> Judgement:
    """Write the figures and the verdict. above: whether the claim is that the figure lies above `bound`."""
    middle, low, high = figures
    right, wrong = (low > bound, high < bound) if above else (high < bound, low > bound)
    verdict: Verdict = "shows" if right else "contradicts" if wrong else "undecided"
    if unit and count < FEW:
        verdict = "undecided"
    number = "{:+.1f}" if unit == "points" else "{:.3g}"
    said = f"{number} {unit} [{number}, {number}]".replace("  ", " ").format(middle, low, high)
    claimed = f"{'above' if above else 'below'} {bound:g}"
    return Judgement(f"{name}: {said}, n = {count}; the claim is {claimed}. {SAID[verdict]}", verdict)
