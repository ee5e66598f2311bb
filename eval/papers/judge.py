"""Whether a paper's claim shows in the rows made here: a mean with its 95% interval, and one sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from leank.eval.methods.prefill.asl import NOWHERE
from leank.eval.papers.item import Contrast, Expect, Measurement
from leank.eval.rows.result_row import ResultRow
from leank.stats import interval, mean

Verdict = Literal["shows", "contradicts", "undecided", "not compared"]
WORDS = {
    "score": "points", "bytes": "times the cache bytes", "first_token": "times the time to the first token",
    "per_token": "times the time per token",
}  # fmt: skip
SECONDS = ("first_token", "per_token")
SHARED = "several processes shared the machine while these seconds were taken, which running without shard= avoids"
FEW = 10  # units of an interval; fewer decide nothing, whatever their interval
RULE_OF_THREE = 300  # samples without a single loss show that less than 1 point is lost, at 95%
FLOOR = 10.0  # points; a method below them has next to nothing to lose
ALIKE = 0.95  # share of samples with equal scores from which a reader is told of it


@dataclass(frozen=True)
class Judgement:
    """What the rows say of one comparison.

    compared: what is compared, and the bound that the paper's claim puts on it.
    verdict: whether the claim shows.
    figures: the mean, its interval and how many units they are of; empty if there is nothing to compare.
    why: why an undecided comparison is not decided.
    remark: what to know of a verdict beside its interval, such as that the methods hardly differ.
    """

    compared: str
    verdict: Verdict
    figures: str = ""
    why: str = ""
    remark: str = ""

    @property
    def remarks(self) -> str:
        """Why it is not decided, and the remark."""
        return "; ".join(filter(None, (self.why, self.remark)))

    @property
    def said(self) -> str:
        """The verdict as a sentence, and the remark as another."""
        said = {
            "shows": "The claim shows here.",
            "contradicts": "This contradicts the paper.",
            "undecided": f"Not decided: {self.why}.",
            "not compared": "There is nothing to compare yet.",
        }[self.verdict]
        return f"{said} {self.remark[0].upper()}{self.remark[1:]}." if self.remark else said

    @property
    def sentence(self) -> str:
        """The figures and what follows from them."""
        return f"{self.compared}: {self.figures}. {self.said}" if self.figures else f"{self.compared}: {self.said}"


def contrast(claim: Contrast, rows: Sequence[ResultRow], alone: bool = True) -> Judgement:
    """Compare two methods sample by sample; tasks and lengths count alike. Seconds are compared batch by batch.

    alone: whether one process made the rows; the seconds of processes that shared a machine decide nothing.
    """
    strata = _samples(claim, rows)
    scores = claim.measure == "score"
    names = f"{claim.first} minus {claim.second}" if scores else f"{claim.first} / {claim.second}"
    names = f"{names}, within {-claim.bound:g}" if claim.equal else f"{names}, {_side(scores)} {claim.bound:g}"
    if not strata:
        return Judgement(names, "not compared")
    found = [[a - b if scores else a / b for a, b in pairs] for pairs in strata.values()]
    few = max(FEW, math.ceil(RULE_OF_THREE / -claim.bound)) if scores and claim.bound < 0 else FEW
    figures = (mean(found), *interval(found))
    if not scores:
        judged = _judged(names, f" {WORDS[claim.measure]}", figures, sum(map(len, found)), few, claim.bound, False)
        shared = claim.measure in SECONDS and not alone
        return replace(judged, verdict="undecided", why=SHARED) if shared else judged
    levels = [mean([[pair[side] for pair in pairs] for pairs in strata.values()]) for side in (0, 1)]
    if claim.equal:
        judged = _within(names, figures, found, few, -claim.bound)
    else:
        judged = _judged(names, " points", figures, sum(map(len, found)), few, claim.bound, True)
    judged = _remarked(judged, claim, levels, found)
    return replace(judged, remark="; ".join(filter(None, (judged.remark, _idle(claim, rows)))))


def expect(claim: Expect, rows: Sequence[Measurement]) -> Judgement:
    """Judge the mean value of some rows of an analysis, or the difference of two such means."""
    name = claim.says if claim.minus is None else f"{claim.says}, difference"
    name = f"{name}, {_side(claim.above)} {claim.bound:g}"
    if claim.by or claim.minus is None:
        units = _units(_pairs(claim, rows) if claim.by else _chosen(claim.of, rows), claim.over)
        if not units:
            return Judgement(name, "not compared")
        figures = mean([units]), *interval([units])
        return _of_analysis(name, claim, figures, len(units), FEW)
    first, second = (_units(_chosen(counts, rows), claim.over) for counts in (claim.of, claim.minus))
    if not first or not second:
        return Judgement(name, "not compared")
    of, minus = mean([first]), mean([second])
    (a, b), (c, d) = interval([first]), interval([second], seed=1)
    # two independent means: their distances to the ends add up in quadrature
    figures = of - minus, of - minus - math.hypot(of - a, d - minus), of - minus + math.hypot(b - of, minus - c)
    return _of_analysis(name, claim, figures, len(first) + len(second), 2 * FEW)


def _samples(claim: Contrast, rows: Sequence[ResultRow]) -> dict[object, list[tuple[float, float]]]:
    """Return both methods' figures of the samples that both have, by task and length."""
    found: dict[object, list[tuple[float, float]]] = defaultdict(list)
    batches: set[float] = set()  # the samples of a batch have the same seconds, which are one measurement
    other = {(r["task"], r["length"], r["sample"], r["seed"]): r for r in rows if r["method"] == claim.second}
    for row in rows:
        against = other.get((row["task"], row["length"], row["sample"], row["seed"]))
        if row["method"] != claim.first or against is None:
            continue
        ours, theirs = _measured(claim, row), _measured(claim, against)
        if ours is None or theirs is None or (claim.measure != "score" and not ours * theirs):
            continue
        if claim.measure not in SECONDS:
            found[row["task"], row["length"]].append((ours, theirs))
        elif ours / theirs not in batches:
            batches.add(ours / theirs)
            found[claim.measure].append((ours, theirs))
    return found


def _measured(claim: Contrast, row: ResultRow) -> float | None:
    if claim.measure == "score":
        return 100 * row["score"]
    return row["cache_bytes"]["total"] if claim.measure == "bytes" else row["seconds"].get(claim.measure)


def _remarked(
    judged: Judgement, claim: Contrast, levels: Sequence[float], differences: Sequence[Sequence[float]]
) -> Judgement:
    """Add both methods' own points, and say where these hardly let the methods differ.

    levels: points of the first and of the second method.
    differences: points of the samples, by task and length.
    """
    figures = judged.figures.replace(", n =", f", {levels[0]:.1f} against {levels[1]:.1f}, n =")
    alike = mean([[float(one == 0) for one in some] for some in differences])
    remark = f"both score alike on {100 * alike:.0f}% of the samples" if alike >= ALIKE else ""
    judged = replace(judged, figures=figures, remark=remark)
    # nothing can be lost where the second method fails, and neither method is better where both fail
    low = levels[1] if claim.bound < 0 and not claim.equal else max(levels)
    if judged.verdict != "contradicts" and low < FLOOR:
        return replace(judged, verdict="undecided", why=f"both nearly always fail, below {FLOOR:g} of 100 points")
    return judged


def _idle(claim: Contrast, rows: Sequence[ResultRow]) -> str:
    """Say where the first method found no layer from which to drop tokens, so that it was another method there."""
    found = [row.get("selected_layer") == NOWHERE for row in rows if row["method"] == claim.first]
    share = sum(found) / max(1, len(found))
    return f"in {100 * share:.0f}% of its samples {claim.first} selected no layer" if share else ""


def _within(
    name: str, figures: tuple[float, float, float], found: Sequence[Sequence[float]], few: int, margin: float
) -> Judgement:
    """Judge the claim that a difference is smaller than `margin` on either side."""
    count = sum(map(len, found))
    above = _judged(name, " points", figures, count, few, -margin, True)
    below = _judged(name, " points", figures, count, few, margin, False)
    if "contradicts" in (above.verdict, below.verdict):
        return above if above.verdict == "contradicts" else below
    return below if above.verdict == "shows" else above


def _of_analysis(name: str, claim: Expect, figures: tuple[float, float, float], count: int, few: int) -> Judgement:
    """Judge the rows of an analysis."""
    if claim.counted:
        judged = _judged(name, "", figures, count, 1, claim.bound, claim.above)
        judged = replace(judged, figures=f"{figures[0]:.3g}, counted")
    else:
        judged = _judged(name, "", figures, count, few, claim.bound, claim.above, claim.units)
    return replace(judged, remark="the bound is a choice made here, the paper gives none") if claim.chosen else judged


def _side(above: bool) -> str:
    return "above" if above else "below"


def _chosen(counts: Callable[[Measurement], bool], rows: Sequence[Measurement]) -> list[tuple[Measurement, float]]:
    """Return the rows that count and have a value, with it."""
    return [
        (row, float(value))
        for row in rows
        if counts(row) and (value := row.get("value")) is not None and value == value
    ]  # not NaN


def _pairs(claim: Expect, rows: Sequence[Measurement]) -> list[tuple[Measurement, float]]:
    """Return the rows that agree in the fields by which they are paired, with the difference of their values."""
    assert claim.minus is not None
    of, minus = ({tuple(row[name] for name in claim.by): (row, value) for row, value in _chosen(counts, rows)}
                 for counts in (claim.of, claim.minus))  # fmt: skip
    return [(of[key][0], of[key][1] - minus[key][1]) for key in of if key in minus]


def _units(found: Sequence[tuple[Measurement, float]], over: Sequence[str]) -> list[float]:
    """Return the mean of each unit's values."""
    units: dict[object, list[float]] = defaultdict(list)
    for number, (row, value) in enumerate(found):
        units[tuple(row[name] for name in over) if over else number].append(value)
    return [sum(values) / len(values) for values in units.values()]


def _judged(
    name: str,
    unit: str,
    figures: tuple[float, float, float],
    count: int,
    few: int,
    bound: float,
    above: bool,
    units: str = "samples",
) -> Judgement:
    """Write the figures and the verdict.

    unit: of the figures, with a space before it.
    few: how many samples, or other units of the interval, it takes to decide.
    above: whether the claim is that the figure lies above `bound`; else below.
    units: what the interval is over.
    """
    middle, low, high = figures
    right, wrong = (low > bound, high < bound) if above else (high < bound, low > bound)
    verdict: Verdict = "shows" if right else "contradicts" if wrong else "undecided"
    why = f"the interval holds {bound:g}"
    if (verdict == "shows" and count < few) or count < min(few, FEW):
        verdict, why = "undecided", f"it takes {few} {units}"
    number = "{:+.1f}" if unit == " points" else "{:.3g}"
    said = f"{number}{unit} [{number}, {number}]".format(middle, low, high)
    many = f"n = {count}" if units == "samples" else f"n = {count} {units}"
    return Judgement(name, verdict, f"{said}, {many}", why if verdict == "undecided" else "")
