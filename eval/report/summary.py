"""Numbers of a report: means with bootstrap intervals, paired differences against dense, bytes and times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from leank.bootstrap import DRAWS, LEVEL, Ends, Strata, mean, together
from leank.eval.report import fidelity
from leank.eval.report.groups import Variant, group, labels, variant, which
from leank.eval.report.pairs import difference, differences, unasked
from leank.eval.report.records import (
    AgainstDense,
    CellFigures,
    DepthMap,
    Figures,
    LengthFigures,
    Mark,
    MethodFigures,
    OpScores,
    RunSummary,
    Seconds,
    Summary,
)  # fmt: skip
from leank.eval.report.turns import by_turn
from leank.eval.rows.result_row import ResultRow

BySample = Mapping[tuple[str, int], ResultRow]
SECONDS = ("prefill", "seal", "first_token", "per_token")
# samples of a cell whose score says less than it seems to; rows of earlier versions lack the fields and count as none
MARKED: dict[Mark, Callable[[ResultRow], bool]] = {
    "not_compressed": lambda row: row.get("compressed") is False,
    "dense_only": lambda row: bool(row.get("dense_only")) and bool(row["settings"]["method"]),
    "non_finite": lambda row: row.get("non_finite") is not None,
    "not_selected": lambda row: row.get("selected_layer") == -1,
}


def summarise(rows: Iterable[ResultRow]) -> Summary:
    """Compute everything that a report shows.

    There is one run for all rows of a model, benchmark and compress switch that differ in the method alone; rows of
    other settings make a run of their own. Within a run `cells` are of one method, task and length, `by_length` of one
    method and length over its tasks, and `overall` of one method. `differences` are those of every method with a
    learned mask minus every other, over all tasks and lengths, as long as there are at most `pairs.COLUMNS` such masks.

    Raises ValueError for a row that no report can be computed from.
    """
    return summarise_groups(group(rows))


def summarise_groups(groups: Iterable[Sequence[ResultRow]], parts: bool = True, columns: Sequence[str] = ()) -> Summary:
    """Compute the same from rows that `group` has grouped already.

    parts: whether cells, lengths, differences, ops and depths are wanted, too; without them the intervals of `overall`
        alone are drawn, and the other lists are empty.
    columns: labels of the methods whose differences from every other are wanted, in place of the learned masks.
    """
    return {"resamples": DRAWS, "level": LEVEL, "runs": [_run(rows, parts, columns) for rows in groups]}


def _mean(values: Iterable[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None


@dataclass(frozen=True)
class _Cell:
    """Rows of one method in one task at one length, with their columns, which all tables of these rows share.

    scores: points. numbers: by name of the column. marked: samples with each mark.
    gains, same, mine, whole: of the samples that dense has, too: points above dense, whether the replies are equal, and
      both cache bytes.
    """

    rows: Sequence[ResultRow]
    scores: Sequence[float]
    numbers: Mapping[str, Sequence[float | None]]
    marked: Mapping[Mark, int]
    gains: Sequence[float]
    same: Sequence[bool]
    mine: Sequence[float]
    whole: Sequence[float]


def _cell(rows: Sequence[ResultRow], dense: BySample) -> _Cell:
    """Read the columns of some rows. dense: the rows to compare with, by sample; empty without any."""
    numbers: dict[str, list[float | None]] = {name: [r["seconds"].get(name) for r in rows] for name in SECONDS}
    numbers["cache_bytes"] = [r["cache_bytes"]["total"] for r in rows]
    numbers["allocated_bytes"] = [r["cache_bytes"].get("allocated") for r in rows]
    numbers["prompt_tokens"] = [r["prompt_tokens"] for r in rows]
    pairs = [(r, d) for r in rows if (d := dense.get(which(r))) is not None] if dense else []
    return _Cell(
        rows,
        [100 * r["score"] for r in rows],
        numbers,
        {mark: sum(map(has, rows)) for mark, has in MARKED.items()},
        [100 * (r["score"] - d["score"]) for r, d in pairs],
        [r["prediction"] == d["prediction"] for r, d in pairs],
        [r["cache_bytes"]["total"] for r, _ in pairs],
        [d["cache_bytes"]["total"] for _, d in pairs],
    )


def _against_dense(cells: Sequence[_Cell]) -> Generator[Strata, Ends, AgainstDense | None]:
    """The paired difference from dense, and the share of equal replies and of bytes; None without common samples."""
    found = yield from difference(cell.gains for cell in cells)
    if found is None:
        return None
    same = float(np.mean([equal for cell in cells for equal in cell.same]))
    mine, whole = sum(chain.from_iterable(c.mine for c in cells)), sum(chain.from_iterable(c.whole for c in cells))
    return {**found, "same_reply": same, "bytes": mine / whole}


def _figures(cells: Sequence[_Cell]) -> Generator[Strata, Ends, Figures]:
    """Figures of one method over some cells, which count alike. Yields what `bootstrap.together` draws intervals of."""

    def average(name: str) -> float | None:
        return _mean(chain.from_iterable(cell.numbers[name] for cell in cells))

    groups = [cell.scores for cell in cells]
    out: Figures = {
        "n": sum(map(len, groups)),
        "score": mean(groups),
        "interval": (yield groups),
        "cache_bytes": average("cache_bytes"),
        "allocated_bytes": average("allocated_bytes"),
        "not_compressed": sum(cell.marked["not_compressed"] for cell in cells),
        "dense_only": sum(cell.marked["dense_only"] for cell in cells),
        "non_finite": sum(cell.marked["non_finite"] for cell in cells),
        "not_selected": sum(cell.marked["not_selected"] for cell in cells),
        "prompt_tokens": average("prompt_tokens"),
        "seconds": Seconds(
            prefill=average("prefill"), seal=average("seal"), first_token=average("first_token"),
            per_token=average("per_token"),
        ),
    }  # fmt: skip
    if (against := (yield from _against_dense(cells))) is not None:
        out["against_dense"] = against
    if (near := (yield from fidelity.figures([cell.rows for cell in cells]))) is not None:
        out["fidelity"] = near
    return out


def _common(rows: Sequence[ResultRow]) -> dict[str, object]:
    """The settings that all rows of a run share, and the digest of each task's data where there is one."""
    shared = {name: value for name, value in rows[0]["settings"].items() if name not in ("method", "data")}
    data = {row["task"]: row["settings"]["data"] for row in rows if "data" in row["settings"]}
    return {**shared, "data": data} if data else shared


def _run(rows: Sequence[ResultRow], parts: bool, columns: Sequence[str]) -> RunSummary:
    """The summary of rows that differ in method, task, length and sample alone."""
    named, configs = labels(rows), {variant(r): r["settings"]["method"] for r in rows}
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lengths = sorted(dict.fromkeys(r["length"] for r in rows), key=lambda n: (n is None, n))
    methods = {name: configs[of] for of, name in named.items()}
    dense = next((name for name, config in methods.items() if not config), None)
    compared = [name for name in columns or unasked(methods) if name in methods]
    cells, by_length, overall = _tables(rows, named, dense, lengths, tasks, parts)
    return {
        "model": rows[0]["model"],
        "benchmark": rows[0]["benchmark"],
        "compress": rows[0]["compress"],
        "settings": _common(rows),
        "versions": sorted(
            {json.dumps(v, sort_keys=True) for v in {id(r["versions"]): r["versions"] for r in rows}.values()}
        ),
        "dense": dense,
        "methods": methods,
        "lengths": lengths,
        "tasks": tasks,
        "rows": len(rows),
        "cells": cells,
        "by_length": by_length,
        "overall": overall,
        "differences": differences(rows, named, compared) if parts else [],
        "by_op": _by_op(rows, named) if parts else [],
        "by_depth": _by_depth(rows, named) if parts else [],
        "by_turn": by_turn(rows, named) if parts else [],
    }


def _tables(
    rows: Sequence[ResultRow], named: Mapping[Variant, str], dense: str | None, lengths: Sequence[int | None],
    tasks: Sequence[str], parts: bool,
) -> tuple[list[CellFigures], list[LengthFigures], list[MethodFigures]]:  # fmt: skip
    """Figures by task and length, by length, and overall, each method in turn. dense: its label, None without any."""
    table: dict[tuple[str, int | None, str], list[ResultRow]] = defaultdict(list)
    for row in rows:
        table[named[variant(row)], row["length"], row["task"]].append(row)
    base = {key[1:]: {which(r): r for r in some} for key, some in table.items() if key[0] == dense}
    by_length: dict[tuple[str, int | None], list[_Cell]] = defaultdict(list)
    overall: dict[str, list[_Cell]] = defaultdict(list)
    cells: dict[tuple[str, int | None, str], _Cell] = {}
    for method, length, task in product(dict.fromkeys(named.values()), lengths, tasks):
        if some := table.get((method, length, task)):
            cell = _cell(some, base.get((length, task), {}) if method != dense else {})
            cells[method, length, task] = cell
            by_length[method, length].append(cell)
            overall[method].append(cell)
    wanted = [[[cell] for cell in cells.values()], [*by_length.values()]] if parts else [[], []]
    drawn = iter(together(map(_figures, chain(*wanted, overall.values()))))
    return (
        [{"method": m, "length": n, "task": t, **next(drawn)} for m, n, t in cells] if parts else [],
        [{"method": m, "length": n, **next(drawn)} for m, n in by_length] if parts else [],
        [{"method": m, **next(drawn)} for m in overall],
    )


def _by_op(rows: Sequence[ResultRow], named: Mapping[Variant, str]) -> list[OpScores]:
    """GSM-Infinite: accuracy (0-1) of each method by op, one group per subset and length."""
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["metric"] != "gsm_infinite" or "op" not in row["meta"]:
            continue
        subset = {2: "medium", 3: "hard"}.get(row["meta"].get("d", 0), "realistic")
        length = str(row["meta"].get("length", "")).upper()
        group = scores.setdefault(f"{subset} {length}".strip(), {}).setdefault(named[variant(row)], {})
        group.setdefault(str(row["meta"]["op"]), []).append(row["score"])
    return [
        {"name": name, "methods": {m: {op: float(np.mean(s)) for op, s in ops.items()} for m, ops in found.items()}}
        for name, found in scores.items()
    ]


def _by_depth(rows: Sequence[ResultRow], named: Mapping[Variant, str]) -> list[DepthMap]:
    """Needle in a haystack: mean score of each method by depth (lines) and length (columns)."""
    found: dict[tuple[str, str], dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["length"] is not None and "depth_percent" in row["meta"]:
            place = row["meta"]["depth_percent"], row["length"]
            found[named[variant(row)], row["task"]][place].append(100 * row["score"])
    maps: list[DepthMap] = []
    for (method, task), cells in found.items():
        depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
        scores = [[_mean(cells.get((depth, length), ())) for length in lengths] for depth in depths]
        maps.append({"method": method, "task": task, "depths": depths, "lengths": lengths, "scores": scores})
    return maps
