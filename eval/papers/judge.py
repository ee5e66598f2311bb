"""Whether a paper's claim shows in the rows made here: a mean with its 95% interval, and one sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from leank.eval.papers.item import Contrast, Expect
from leank.eval.report.groups import paired
from leank.eval.report.sampled import by_sample
from leank.eval.report.summary import Values, strata
from leank.stats import interval, mean

Verdict = Literal["shows", "contradicts", "undecided"]
Figures = tuple[float, float, float]  # a mean and the ends of its interval
COLUMNS = {"score": "score", "bytes": "cache_bytes", "first_token": "first_token", "per_token": "per_token"}
UNITS = {
    "score": " points", "bytes": " times the cache bytes", "first_token": " times the time to the first token",
    "per_token": " times the time per token",
}  # fmt: skip
FEW = 10  # units of an interval; fewer decide nothing, whatever their interval
RULE_OF_THREE = 300  # samples without a single loss show that less than 1 point is lost, at 95%
FLOOR = 10.0  # points; a method below them has next to nothing to lose
ALIKE = 0.95  # share of samples with equal scores from which a reader is told of it


@dataclass(frozen=True)
class Judgement:
    """What the rows say of one comparison."""

    compared: str  # what is compared, and the bound that the paper's claim puts on it
    figures: str  # the mean, its interval and how many units they are of
    verdict: Verdict  # whether the claim shows
    why: str = ""  # why an undecided comparison is not decided
    remarks: Sequence[str] = ()  # what to know of a verdict beside its interval, such as that the methods hardly differ

    @property
    def sentence(self) -> str:
        """The figures and what follows from them."""
        said = {
            "shows": "The claim shows here",
            "contradicts": "This contradicts the paper",
            "undecided": f"Not decided: {self.why}",
        }[self.verdict]
        remark = "; ".join(self.remarks)
        return f"{self.compared}: {self.figures}. {said}." + (f" {remark[0].upper()}{remark[1:]}." if remark else "")


def contrast(claim: Contrast, runs: Sequence[pd.DataFrame]) -> Judgement | None:
    """Compare two methods sample by sample; tasks and lengths count alike. Seconds are compared batch by batch.

    runs: of `report.groups.frame`. Returns None where no sample has both.
    """
    name, scores = COLUMNS[claim.measure], claim.measure == "score"
    pairs = [paired(table, claim.first, claim.second) for table in runs]
    pairs = [p.assign(ratio=p[f"{name}_first"] / p[f"{name}_second"].replace(0, np.nan),
                      gain=p["score_first"] - p["score_second"]) for p in pairs if len(p)]  # fmt: skip
    found = [values for p in pairs for values in strata(by_sample(p), "gain" if scores else "ratio")]
    if not scores:
        found = [kept for values in found if len(kept := values[values > 0])]  # a clock may have read 0 seconds
    if name == claim.measure and not scores and found:
        found = [np.unique(np.concatenate(found))]  # the samples of a batch have the same seconds: one measurement
    if not found:
        return None
    figures, count = (mean(found), *interval(found)), sum(map(len, found))
    few = max(FEW, math.ceil(RULE_OF_THREE / -claim.bound)) if scores and claim.bound < 0 else FEW
    compared = f"{claim.first} {'minus' if scores else '/'} {claim.second}, "
    compared += f"within {-claim.bound:g}" if claim.equal else f"{'above' if scores else 'below'} {claim.bound:g}"
    verdict, why = _decided(figures, claim.bound, scores, count, few)
    if claim.equal:
        above, (verdict, why) = (verdict, why), _decided(figures, -claim.bound, False, count, few)
        if above[0] == "contradicts" or (above[0] == "undecided" and verdict != "contradicts"):
            verdict, why = above
    levels, remarks = "", []
    if scores:
        first, second = (mean([s for p in pairs for s in strata(p, f"score_{side}")]) for side in ("first", "second"))
        levels = f", {first:.1f} against {second:.1f}"
        # nothing can be lost where the second method fails, and neither method is better where both fail
        low = second if claim.bound < 0 and not claim.equal else max(first, second)
        if verdict != "contradicts" and low < FLOOR:
            verdict, why = "undecided", f"both nearly always fail, below {FLOOR:g} of 100 points"
        if (alike := mean([gain == 0 for gain in found])) >= ALIKE:
            remarks.append(f"both score alike on {100 * alike:.0f}% of the samples")
        if idle := mean([np.concatenate([p["not_selected_first"] for p in pairs])]):
            remarks.append(f"in {100 * idle:.0f}% of its samples {claim.first} selected no layer")
    return Judgement(compared, f"{_written(figures, UNITS[claim.measure])}{levels}, n = {count}", verdict, why, remarks)


def expect(claim: Expect, rows: pd.DataFrame) -> Judgement | None:
    """Judge the mean value of some rows of an analysis, or the difference of two such means; None without any."""
    bound, above = (claim.below, False) if claim.above is None else (claim.above, True)
    assert bound is not None
    of, minus = (_rows(rows, query) for query in (claim.of, claim.minus))
    few = FEW
    if claim.by:
        of = of.merge(minus, on=claim.by, suffixes=("", "_minus"))
        of["value"] -= of["value_minus"]
    first, second = (_units(found, claim.over) for found in (of, minus))
    count = len(first)
    if not count or (claim.minus and not len(second)):
        return None
    figures = (mean([first]), *interval([first]))
    if claim.minus and not claim.by:  # two independent means: their distances to the ends add up in quadrature
        (middle, low, high), other, ends = figures, mean([second]), interval([second], seed=1)
        figures = (middle - other, middle - other - math.hypot(middle - low, ends[1] - other),
                   middle - other + math.hypot(high - middle, other - ends[0]))  # fmt: skip
        count, few = count + len(second), 2 * FEW
    written = _written(figures) + f", n = {count}" + (f" {claim.units}" if claim.units != "samples" else "")
    verdict, why = _decided(figures, bound, above, count, 1 if claim.counted else few, claim.units)
    return Judgement(
        f"{claim.mean}{', difference' if claim.minus else ''}, {'above' if above else 'below'} {bound:g}",
        f"{figures[0]:.3g}, counted" if claim.counted else written, verdict, why,
        ["the bound is a choice made here, the paper gives none"] if claim.chosen else [],
    )  # fmt: skip


def _rows(rows: pd.DataFrame, query: str | None) -> pd.DataFrame:
    """Return the rows that a query names and that have a value; none without a query, or without such columns."""
    try:
        return rows[:0] if query is None else rows.query(query, engine="python").dropna(subset="value")
    except pd.errors.UndefinedVariableError:  # the analysis failed that has them
        return rows[:0]


def _units(rows: pd.DataFrame, over: Sequence[str]) -> Values:
    values = rows.groupby(list(over), dropna=False)["value"].mean() if over and len(rows) else rows["value"]
    return values.to_numpy(float)


def _decided(
    figures: Figures, bound: float, above: bool, count: int, few: int, units: str = "samples"
) -> tuple[Verdict, str]:
    """Return whether a figure lies above (or below) `bound`, and why that is undecided; few: units it takes."""
    _, low, high = figures
    right, wrong = (low > bound, high < bound) if above else (high < bound, low > bound)
    if (right and count < few) or count < min(few, FEW):
        return "undecided", f"it takes {few} {units}"
    return ("shows", "") if right else ("contradicts", "") if wrong else ("undecided", f"the interval holds {bound:g}")


def _written(figures: Figures, unit: str = "") -> str:
    number = "{:+.1f}" if unit == UNITS["score"] else "{:.3g}"
    return f"{number}{unit} [{number}, {number}]".format(*figures)
