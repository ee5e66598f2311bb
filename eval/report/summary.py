"""Numbers of a report: means with bootstrap intervals, paired differences against dense, bytes and times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from eval.report import fidelity
from eval.report.groups import group, labels, which
from eval.report.records import (
    AgainstDense,
    CellFigures,
    DepthMap,
    Difference,
    Figures,
    LengthFigures,
    Mark,
    MethodDifference,
    MethodFigures,
    OpScores,
    RunSummary,
    Seconds,
    Summary,
)  # fmt: skip
from eval.report.turns import by_turn
from eval.rows.result_row import ResultRow
from leank_train.common.bootstrap import DRAWS, LEVEL, interval, mean

BySample = Mapping[tuple[str, int], ResultRow]
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
    learned mask minus every other, over all tasks and lengths.

    Raises ValueError for a row that no report can be computed from.
    """
    return summarise_groups(group(rows))


def summarise_groups(groups: Iterable[Sequence[ResultRow]], parts: bool = True) -> Summary:
    """Compute the same from rows that `group` has grouped already.

    parts: whether cells, lengths, differences, ops and depths are wanted, too; without them the intervals of `overall`
        alone are drawn, and the other lists are empty.
    """
    return {"resamples": DRAWS, "level": LEVEL, "runs": [_run(rows, parts) for rows in groups]}


def _mean(values: Iterable[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None


def _difference(tasks: Mapping[str, Sequence[ResultRow]], other: Mapping[str, BySample]) -> Difference | None:
    """Mean paired difference in points over the samples that both have; None if there are none.

    tasks: rows of one method by task.
    other: by task and sample, rows of the method to subtract.
    """
    strata = [
        [100 * (r["score"] - other[task][which(r)]["score"]) for r in rows if which(r) in other.get(task, {})]
        for task, rows in tasks.items()
    ]
    strata = [stratum for stratum in strata if stratum]
    if not strata:
        return None
    return {"n": sum(map(len, strata)), "difference": mean(strata), "interval": interval(strata)}


def _against_dense(tasks: Mapping[str, Sequence[ResultRow]], dense: Mapping[str, BySample]) -> AgainstDense | None:
    """The paired difference from dense, and the share of equal replies and of bytes; None without common samples."""
    found = _difference(tasks, dense)
    if found is None:
        return None
    pairs = [(r, dense[t][which(r)]) for t, rows in tasks.items() for r in rows if which(r) in dense.get(t, {})]
    mine, whole = (sum(pair[i]["cache_bytes"]["total"] for pair in pairs) for i in (0, 1))
    same = float(np.mean([r["prediction"] == d["prediction"] for r, d in pairs]))
    return {**found, "same_reply": same, "bytes": mine / whole}


def _figures(tasks: Mapping[str, Sequence[ResultRow]], dense: Mapping[str, BySample] | None) -> Figures:
    """Figures of one method over some tasks, which count alike. dense: rows to compare with, by task and sample."""
    groups = [[100 * r["score"] for r in rows] for rows in tasks.values()]
    rows = [r for rows in tasks.values() for r in rows]

    def seconds(name: str) -> float | None:
        return _mean(r["seconds"].get(name) for r in rows)

    out: Figures = {
        "n": len(rows),
        "score": mean(groups),
        "interval": interval(groups),
        "cache_bytes": _mean(r["cache_bytes"]["total"] for r in rows),
        "allocated_bytes": _mean(r["cache_bytes"].get("allocated") for r in rows),
        "not_compressed": sum(map(MARKED["not_compressed"], rows)),
        "dense_only": sum(map(MARKED["dense_only"], rows)),
        "non_finite": sum(map(MARKED["non_finite"], rows)),
        "not_selected": sum(map(MARKED["not_selected"], rows)),
        "prompt_tokens": _mean(r["prompt_tokens"] for r in rows),
        "seconds": Seconds(
            prefill=seconds("prefill"), seal=seconds("seal"), first_token=seconds("first_token"),
            per_token=seconds("per_token"),
        ),
    }  # fmt: skip
    if dense is not None and (against := _against_dense(tasks, dense)) is not None:
        out["against_dense"] = against
    if (near := fidelity.figures(list(tasks.values()))) is not None:
        out["fidelity"] = near
    return out


def _common(rows: Sequence[ResultRow]) -> dict[str, object]:
    """The settings that all rows of a run share, and the digest of each task's data where there is one."""
    shared = {name: value for name, value in rows[0]["settings"].items() if name not in ("method", "data")}
    data = {row["task"]: row["settings"]["data"] for row in rows if "data" in row["settings"]}
    return {**shared, "data": data} if data else shared


def _run(rows: Sequence[ResultRow], parts: bool) -> RunSummary:
    """The summary of rows that differ in method, task, length and sample alone."""
    named, configs = labels(rows), {r["config"]: r["settings"]["method"] for r in rows}
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lengths = sorted(dict.fromkeys(r["length"] for r in rows), key=lambda n: (n is None, n))
    methods = {name: configs[config] for config, name in named.items()}
    dense = next((name for name, config in methods.items() if not config), None)
    cells, by_length, overall = _tables(rows, named, dense, lengths, tasks, parts)
    return {
        "model": rows[0]["model"],
        "benchmark": rows[0]["benchmark"],
        "compress": rows[0]["compress"],
        "settings": _common(rows),
        "versions": sorted({json.dumps(r["versions"], sort_keys=True) for r in rows}),
        "dense": dense,
        "methods": methods,
        "lengths": lengths,
        "tasks": tasks,
        "rows": len(rows),
        "cells": cells,
        "by_length": by_length,
        "overall": overall,
        "differences": _differences(rows, named, methods) if parts else [],
        "by_op": _by_op(rows, named) if parts else [],
        "by_depth": _by_depth(rows, named) if parts else [],
        "by_turn": by_turn(rows, named) if parts else [],
    }


def _tables(
    rows: Sequence[ResultRow], named: Mapping[str, str], dense: str | None, lengths: Sequence[int | None],
    tasks: Sequence[str], parts: bool,
) -> tuple[list[CellFigures], list[LengthFigures], list[MethodFigures]]:  # fmt: skip
    """Figures by task and length, by length, and overall, each method in turn. dense: its label, None without any."""
    table: dict[tuple[str, int | None, str], list[ResultRow]] = defaultdict(list)
    for row in rows:
        table[named[row["config"]], row["length"], row["task"]].append(row)

    def of_method(method: str) -> tuple[list[CellFigures], list[LengthFigures], MethodFigures]:
        cells: list[CellFigures] = []
        by_length: list[LengthFigures] = []
        everything: dict[str, list[ResultRow]] = {}
        all_dense: dict[str, BySample] = {}
        compare = dense is not None and method != dense
        for length in lengths:
            mine = {t: table[method, length, t] for t in tasks if (method, length, t) in table}
            if not mine:
                continue
            base = {t: {which(r): r for r in table.get((dense or "", length, t), [])} for t in mine}
            for task, of_task in mine.items() if parts else ():
                figures = _figures({task: of_task}, base if compare else None)
                cells.append({"method": method, "length": length, "task": task, **figures})
            if parts:
                by_length.append({"method": method, "length": length, **_figures(mine, base if compare else None)})
            everything |= {f"{t}@{length}": r for t, r in mine.items()}
            all_dense |= {f"{t}@{length}": d for t, d in base.items()}
        return cells, by_length, {"method": method, **_figures(everything, all_dense if compare else None)}

    with ThreadPoolExecutor() as pool:  # NumPy lets other threads run while it draws the samples of an interval
        found = list(pool.map(of_method, dict.fromkeys(named.values())))
    cells, by_length, overall = zip(*found, strict=True)
    return [c for of in cells for c in of], [c for of in by_length for c in of], list(overall)


def _differences(
    rows: Sequence[ResultRow], named: Mapping[str, str], methods: Mapping[str, Mapping[str, Any]]
) -> list[MethodDifference]:
    """Every method with a learned mask minus every other method, over all samples that both have."""
    table: dict[str, dict[str, dict[tuple[str, int], ResultRow]]] = {name: defaultdict(dict) for name in methods}
    for row in rows:
        table[named[row["config"]]][f"{row['task']}@{row['length']}"][which(row)] = row
    learned = [name for name, config in methods.items() if config.get("channels", {}).get("name") == "leank"]
    mine = {name: {task: list(of_task.values()) for task, of_task in table[name].items()} for name in learned}
    pairs = [(method, other) for method in learned for other in methods if other != method]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda pair: _difference(mine[pair[0]], table[pair[1]]), pairs))
    return [
        {"method": method, "minus": other, **difference}
        for (method, other), difference in zip(pairs, found, strict=True)
        if difference is not None
    ]


def _by_op(rows: Sequence[ResultRow], named: Mapping[str, str]) -> list[OpScores]:
    """GSM-Infinite: accuracy (0-1) of each method by op, one group per subset and length."""
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["metric"] != "gsm_infinite" or "op" not in row["meta"]:
            continue
        subset = {2: "medium", 3: "hard"}.get(row["meta"].get("d", 0), "realistic")
        length = str(row["meta"].get("length", "")).upper()
        group = scores.setdefault(f"{subset} {length}".strip(), {}).setdefault(named[row["config"]], {})
        group.setdefault(str(row["meta"]["op"]), []).append(row["score"])
    return [
        {"name": name, "methods": {m: {op: float(np.mean(s)) for op, s in ops.items()} for m, ops in found.items()}}
        for name, found in scores.items()
    ]


def _by_depth(rows: Sequence[ResultRow], named: Mapping[str, str]) -> list[DepthMap]:
    """Needle in a haystack: mean score of each method by depth (lines) and length (columns)."""
    found: dict[tuple[str, str], dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["length"] is not None and "depth_percent" in row["meta"]:
            place = row["meta"]["depth_percent"], row["length"]
            found[named[row["config"]], row["task"]][place].append(100 * row["score"])
    maps: list[DepthMap] = []
    for (method, task), cells in found.items():
        depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
        scores = [[_mean(cells.get((depth, length), ())) for length in lengths] for depth in depths]
        maps.append({"method": method, "task": task, "depths": depths, "lengths": lengths, "scores": scores})
    return maps
