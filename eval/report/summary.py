"""Numbers of a report: means with bootstrap intervals, paired differences against dense, bytes and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.results import latest

RESAMPLES, LEVEL = 2000, 0.95
Row = Mapping[str, Any]


def interval(groups: Sequence[np.ndarray], seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of the groups' means; samples are redrawn within their group."""
    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for values in groups:
        means += values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means / len(groups), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _mean(values: Iterable[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None


def _cell(tasks: Mapping[str, Sequence[Row]], dense: Mapping[str, Mapping[str, Row]] | None) -> dict[str, Any]:
    """Figures of one method over some tasks (each counts alike); dense: task -> sample -> row, to compare with."""
    groups = [np.array([100 * r["score"] for r in rows]) for rows in tasks.values()]
    rows = [r for rows in tasks.values() for r in rows]
    out: dict[str, Any] = {
        "n": len(rows),
        "score": float(np.mean([g.mean() for g in groups])),
        "interval": interval(groups),
        "cache_bytes": _mean(r["cache_bytes"]["total"] for r in rows),
        "prompt_tokens": _mean(r["prompt_tokens"] for r in rows),
        "seconds": {
            name: _mean(r["seconds"].get(name) for r in rows)
            for name in ("prefill", "seal", "first_token", "per_token")
        },
    }
    if dense is not None:
        both = [
            [(r, dense[task][r["sample"]]) for r in rows if r["sample"] in dense.get(task, {})]
            for task, rows in tasks.items()
        ]
        pairs = [pair for group in both for pair in group]
        if pairs:
            differences = [np.array([100 * (r["score"] - d["score"]) for r, d in group]) for group in both if group]
            bytes_mine, bytes_dense = (sum(pair[i]["cache_bytes"]["total"] for pair in pairs) for i in (0, 1))
            out["against_dense"] = {
                "n": len(pairs),
                "difference": float(np.mean([d.mean() for d in differences])),
                "interval": interval(differences),
                "same_reply": float(np.mean([r["prediction"] == d["prediction"] for r, d in pairs])),
                "bytes": bytes_mine / bytes_dense,
            }
    return out


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """Everything that a report shows, as JSON: one entry a (model, benchmark, compress), scores 0-100.

    Of each, `cells` are of one method, task and length, `by_length` of one method and length over its tasks, `overall`
    of one method. `dense` names the method that differences are taken from.
    """
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in latest(rows):
        groups[row["model"], row["benchmark"], row["compress"]].append(row)
    return {"resamples": RESAMPLES, "level": LEVEL, "runs": [_run(*key, rows) for key, rows in groups.items()]}


def _run(model: str, benchmark: str, compress: str, rows: list[Row]) -> dict[str, Any]:
    table: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        table[row["method"], row["length"], row["task"]].append(row)
    methods, lengths, tasks = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1, 2))
    lengths.sort(key=lambda n: (n is None, n))
    dense_name = next((m for m in methods if not next(r for r in rows if r["method"] == m)["settings"]["method"]), None)
    out: dict[str, Any] = {
        "model": model, "benchmark": benchmark, "compress": compress, "dense": dense_name,
        "methods": {m: next(r for r in rows if r["method"] == m)["settings"]["method"] for m in methods},
        "lengths": lengths, "tasks": tasks, "rows": len(rows), "cells": [], "by_length": [], "overall": [],
        "versions": rows[-1]["versions"],
    }  # fmt: skip
    for method in methods:
        everything: dict[str, list[Row]] = {}
        everything_dense: dict[str, dict[str, Row]] = {}
        for length in lengths:
            mine = {t: table[method, length, t] for t in tasks if (method, length, t) in table}
            if not mine:
                continue
            dense = None
            if dense_name is not None and method != dense_name:
                dense = {t: {r["sample"]: r for r in table.get((dense_name, length, t), [])} for t in mine}
            where = {"method": method, "length": length}
            for task, of_task in mine.items():
                out["cells"].append({**where, "task": task, **_cell({task: of_task}, dense)})
            out["by_length"].append({**where, **_cell(mine, dense)})
            everything |= {f"{t}@{length}": r for t, r in mine.items()}
            everything_dense |= {f"{t}@{length}": d for t, d in (dense or {}).items()}
        paired = everything_dense if dense_name is not None and method != dense_name else None
        out["overall"].append({"method": method, **_cell(everything, paired)})
    return out
