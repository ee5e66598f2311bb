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
SECONDS = ("first_token", "per_token")
FEW = 10  # units of an interval over samples; fewer decide nothing, whatever their interval
RULE_OF_THREE = 300  # samples without a single loss show that less than 1 point is lost, at 95%


@dataclass(frozen=True)
class Judgement:
    """What the rows say of one comparison.

    compared: what is compared, and the bound that the paper's claim puts on it.
    verdict: whether the claim shows.
    figures: the mean, its interval and how many units they are of; empty if there is nothing to compare.
    why: why an undecided comparison is not decided.
    """

    compared: str
    verdict: Verdict
    figures: str = ""
    why: str = ""

    @property
    def said(self) -> str:
        """The verdict as a sentence."""
        return {
            "shows": "The claim shows here.",
            "contradicts": "This contradicts the paper.",
            "undecided": f"Not decided: {self.why}.",
            "not compared": "There is nothing to compare yet.",
        }[self.verdict]

    @property
    def sentence(self) -> str:
        """The figures and what follows from them."""
        return f"{self.compared}: {self.figures}. {self.said}" if self.figures else f"{self.compared}: {self.said}"


def contrast(claim: Contrast, rows: Sequence[ResultRow]) -> Judgement:
    """Compare two methods sample by sample; tasks and lengths count alike. Seconds are compared batch by batch."""
    strata: dict[object, list[float]] = defaultdict(list)
    batches: set[float] = set()  # the samples of a batch have the same seconds, which are one measurement
    other = {(r["task"], r["length"], *which(r)): r for r in rows if r["method"] == claim.second}
    for row in rows:
        against = other.get((row["task"], row["length"], *which(row)))
        if row["method"] == claim.first and against is not None:
            value = _compared(claim, row, against)
            if claim.measure in SECONDS and value is not None and value not in batches:
                batches.add(value)
                strata[claim.measure].append(value)
            elif claim.measure not in SECONDS and value is not None:
                strata[row["task"], row["length"]].append(value)
    above = claim.measure == "score"
    names = f"{claim.first} minus {claim.second}" if above else f"{claim.first} / {claim.second}"
    names = f"{names}, {_side(above)} {claim.bound:g}"
    if not strata:
        return Judgement(names, "not compared")
    found = list(strata.values())
    few = max(FEW, math.ceil(RULE_OF_THREE / -claim.bound)) if above and claim.bound < 0 else FEW
    figures = (mean(found), *interval(found))
    return _judged(names, WORDS[claim.measure], figures, sum(map(len, found)), few, claim.bound, above)


def expect(claim: Expect, rows: Sequence[Row]) -> Judgement:
    """Judge the mean value of some rows of an analysis, or the difference of two such means."""
    name = claim.says if claim.minus is None else f"{claim.says}, difference"
    name = f"{name}, {_side(claim.above)} {claim.bound:g}"
    few = FEW if "sample" in claim.over else 1
    if claim.by or claim.minus is None:
        units = _units(_pairs(claim, rows) if claim.by else _chosen(claim.of, rows), claim.over)
        if not units:
            return Judgement(name, "not compared")
        figures = mean([units]), *interval([units])
        return _judged(name, "", figures, len(units), few, claim.bound, claim.above)
    first, second = (_units(_chosen(counts, rows), claim.over) for counts in (claim.of, claim.minus))
    if not first or not second:
        return Judgement(name, "not compared")
    of, minus = mean([first]), mean([second])
    (a, b), (c, d) = interval([first]), interval([second], seed=1)
    # two independent means: their distances to the ends add up in quadrature
    figures = of - minus, of - minus - math.hypot(of - a, d - minus), of - minus + math.hypot(b - of, minus - c)
    return _judged(name, "", figures, len(first) + len(second), 2 * few, claim.bound, claim.above)


def _compared(claim: Contrast, row: ResultRow, against: ResultRow) -> float | None:
    if claim.measure == "score":
        return 100 * (row["score"] - against["score"])
    if claim.measure == "bytes":
        return row["cache_bytes"]["total"] / against["cache_bytes"]["total"]
    ours, theirs = row["seconds"].get(claim.measure), against["seconds"].get(claim.measure)
    return ours / theirs if ours and theirs else None


def _side(above: bool) -> str:
    return "above" if above else "below"


def _chosen(counts: Callable[[Row], bool], rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return the rows that count and have a value, with it."""
    return [(row, float(value)) for row in rows if counts(row) and (value := row.get("value")) is not None]


def _pairs(claim: Expect, rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return the rows that agree in the fields by which they are paired, with the difference of their values."""
    assert claim.minus is not None
    of, minus = ({tuple(row[name] for name in claim.by): (row, value) for row, value in _chosen(counts, rows)}
                 for counts in (claim.of, claim.minus))  # fmt: skip
    return [(of[key][0], of[key][1] - minus[key][1]) for key in of if key in minus]


def _units(found: Sequence[tuple[Row, float]], over: Sequence[str]) -> list[float]:
    """Return the mean of each unit's values."""
    units: dict[object, list[float]] = defaultdict(list)
    for number, (row, value) in enumerate(found):
        units[tuple(row[name] for name in over) if over else number].append(value)
    return [sum(values) / len(values) for values in units.values()]


def _judged(
    name: str, unit: str, figures: tuple[float, float, float], count: int, few: int, bound: float, above: bool
) -> Judgement:
    """Write the figures and the verdict.

    few: units that it takes to decide.
    above: whether the claim is that the figure lies above `bound`; else below.
    """
    middle, low, high = figures
    right, wrong = (low > bound, high < bound) if above else (high < bound, low > bound)
    verdict: Verdict = "shows" if right else "contradicts" if wrong else "undecided"
    why = f"the interval holds {bound:g}"
    if (verdict == "shows" and count < few) or count < min(few, FEW):
        verdict, why = "undecided", f"it takes {few} samples"
    number = "{:+.1f}" if unit == "points" else "{:.3g}"
    said = f"{number} {unit} [{number}, {number}]".replace("  ", " ").format(middle, low, high)
    return Judgement(name, verdict, f"{said}, n = {count}", why if verdict == "undecided" else "")
