"""Differences of whole methods in a report: each learned mask, or each method that was asked for, minus every other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from leank.bootstrap import Ends, Strata, mean, together
from leank.eval.report.groups import Variant, variant, which
from leank.eval.report.records import Difference, MethodDifference
from leank.eval.rows.result_row import ResultRow

COLUMNS = 8  # learned masks that are compared unasked: pairs grow with their number, and no page is wider


def learned(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the labels of the methods that have a learned mask. methods: configurations by label."""
    return [name for name, config in methods.items() if config.get("channels", {}).get("name") == "leank"]


def unasked(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the labels of the methods that are compared with all others unless some are named."""
    found = learned(methods)
    return found if len(found) <= COLUMNS else []


def difference(strata: Iterable[Sequence[float]]) -> Generator[Strata, Ends, Difference | None]:
    """Compute the mean of paired differences in points; None if there are none.

    strata: those of each task at each length.
    Yields the values whose interval it is then sent (`leank.bootstrap.together`).
    """
    strata = [stratum for stratum in strata if stratum]
    if not strata:
        return None
    return {"n": sum(map(len, strata)), "difference": mean(strata), "interval": (yield strata)}


def differences(
    rows: Sequence[ResultRow], named: Mapping[Variant, str], columns: Sequence[str]
) -> list[MethodDifference]:
    """Compute each method of `columns` minus every other method, over all samples that both have.

    named: labels of the methods, see `eval.report.groups.labels`.
    """
    table: dict[str, dict[str, dict[tuple[str, int], float]]] = {name: defaultdict(dict) for name in named.values()}
    for row in rows:
        table[named[variant(row)]][f"{row['task']}@{row['length']}"][which(row)] = row["score"]
    pairs = [(method, other) for method in columns for other in table if other != method]

    def gains(method: str, other: str) -> Iterable[list[float]]:
        for cell, mine in table[method].items():
            base = table[other].get(cell, {})
            yield [100 * (score - base[at]) for at, score in mine.items() if at in base]

    found = together(difference(gains(*pair)) for pair in pairs)
    return [
        {"method": method, "minus": other, **one}
        for (method, other), one in zip(pairs, found, strict=True)
        if one is not None
    ]
