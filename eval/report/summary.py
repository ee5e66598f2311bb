"""Numbers of a report: means with bootstrap intervals, paired differences against dense, bytes and times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from leank_train.common.bootstrap import DRAWS, LEVEL, interval, mean

Row = Mapping[str, Any]
# samples of a cell whose score says less than it seems to; rows of earlier versions lack the fields and count as none
MARKED: dict[str, Callable[[Row], bool]] = {
    "not_compressed": lambda row: row.get("compressed") is False,
    "dense_only": lambda row: bool(row.get("dense_only")) and bool(row["settings"]["method"]),
    "non_finite": lambda row: row.get("non_finite") is not None,
}


def summarise(rows: Iterable[Row]) -> dict[str, Any]:
    """Everything that a report shows, as JSON; scores are 0-100.

    One run for all rows of a model, benchmark and compress switch that differ in method alone (other settings make a
    run of their own). In it `cells` are of one method, task and length, `by_length` of one method and length over its
    tasks, `overall` of one method. `dense` names the method that differences are taken from. `differences` are those of
    every method with a learned mask, minus every other, over all tasks and lengths.
    """
    return {"resamples": DRAWS, "level": LEVEL, "runs": [_run(rows) for rows in group(rows)]}


def group(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each run, in order of appearance.

    Where a task was run on several data (the digest in its settings), the last of them stands with the other tasks,
    and each earlier one in a run of its own. Samples whose text spells special tokens have those in their settings and
    belong to the run of the others; of one that is there in several ways, as text counts first.
    """
    runs: dict[tuple[str, ...], dict[tuple[Any, ...], Row]] = defaultdict(dict)
    for row in rows:
        common = {n: value for n, value in row["settings"].items() if n not in ("method", "data", "specials")}
        run = runs[row["model"], row["benchmark"], row["compress"], json.dumps(common, sort_keys=True)]
        method = row["method"], json.dumps(row["settings"]["method"], sort_keys=True)
        sample = (*method, row["task"], row["length"], row["settings"].get("data"), *which(row))
        if sample not in run or _rank(row) > _rank(run[sample]):
            run[sample] = row
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for key, together in runs.items():
        known: dict[str, list[str | None]] = defaultdict(list)
        for row in together.values():
            if (data := row["settings"].get("data")) not in known[row["task"]]:
                known[row["task"]].append(data)
        for row in together.values():
            of_task = known[row["task"]]
            groups[key, len(of_task) - of_task.index(row["settings"].get("data"))].append(row)
    return list(groups.values())


def _rank(row: Row) -> int:
    return (None, "as_is", "text").index(row["settings"].get("specials"))


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """A name for every `config` digest: the method's label, and where it was run with several settings, those; but
    not those that were set to match bytes (eval.run.matched), which differ from cell to cell.
    """
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        flat = _flat(row["settings"]["method"])
        own = {name: value for name, value in flat.items() if name not in flat.get("matched.settings", ())}
        found[row["method"]].setdefault(row["config"], own)
    names = {}
    for label, variants in found.items():
        every = list(variants.values())
        differing = [k for k in dict.fromkeys(k for v in every for k in v) if len({repr(v.get(k)) for v in every}) > 1]
        for config, flat in variants.items():
            said = ", ".join(f"{name.rsplit('.', 1)[-1]}={flat[name]}" for name in differing if name in flat)
            names[config] = f"{label} ({said})" if differing else label
    return names


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out


def which(row: Row) -> tuple[str, int]:
    """Which sample of its task and length a row is of."""
    return row["sample"], row["seed"]


def paired(rows: Sequence[Row], first: str, second: str) -> list[tuple[Row, Row]]:
    """(row of `first`, row of `second`) of every sample that both labels have, as `labels` names them."""
    named = labels(rows)
    place = {(r["task"], r["length"], *which(r)): r for r in rows if named[r["config"]] == first}
    mine = [(place.get((r["task"], r["length"], *which(r))), r) for r in rows if named[r["config"]] == second]
    return [(a, b) for a, b in mine if a is not None]


def changed(rows: Sequence[Row], first: str, second: str) -> list[tuple[Row, Row]]:
    """Those of `paired` whose replies differ; what `second` loses most comes first."""
    differing = [(a, b) for a, b in paired(rows, first, second) if a["prediction"] != b["prediction"]]
    return sorted(differing, key=lambda pair: pair[1]["score"] - pair[0]["score"])


def _mean(values: Iterable[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None


def _difference(tasks: Mapping[str, Sequence[Row]], other: Mapping[str, Mapping[tuple, Row]]) -> dict[str, Any] | None:
    """Mean paired difference in points over the samples that both have; None if there are none.

    tasks: task -> rows of one method. other: task -> `which` -> row of the method to subtract.
    """
    strata = [
        [100 * (r["score"] - other[task][which(r)]["score"]) for r in rows if which(r) in other.get(task, {})]
        for task, rows in tasks.items()
    ]
    strata = [stratum for stratum in strata if stratum]
    if not strata:
        return None
    return {"n": sum(map(len, strata)), "difference": mean(strata), "interval": interval(strata)}


def _cell(tasks: Mapping[str, Sequence[Row]], dense: Mapping[str, Mapping[tuple, Row]] | None) -> dict[str, Any]:
    """Figures of one method over some tasks (each counts alike); dense: task -> `which` -> row, to compare with."""
    groups = [[100 * r["score"] for r in rows] for rows in tasks.values()]
    rows = [r for rows in tasks.values() for r in rows]
    out: dict[str, Any] = {
        "n": len(rows),
        "score": mean(groups),
        "interval": interval(groups),
        "cache_bytes": _mean(r["cache_bytes"]["total"] for r in rows),
        "allocated_bytes": _mean(r["cache_bytes"].get("allocated") for r in rows),
        **{name: sum(map(found, rows)) for name, found in MARKED.items()},
        "prompt_tokens": _mean(r["prompt_tokens"] for r in rows),
        "seconds": {
            name: _mean(r["seconds"].get(name) for r in rows)
            for name in ("prefill", "seal", "first_token", "per_token")
        },
    }
    found = None if dense is None else _difference(tasks, dense)
    if dense is not None and found is not None:
        pairs = [
            (r, dense[t][which(r)]) for t, of_task in tasks.items() for r in of_task if which(r) in dense.get(t, ())
        ]
        bytes_mine, bytes_dense = (sum(pair[i]["cache_bytes"]["total"] for pair in pairs) for i in (0, 1))
        out["against_dense"] = {
            **found,
            "same_reply": float(np.mean([r["prediction"] == d["prediction"] for r, d in pairs])),
            "bytes": bytes_mine / bytes_dense,
        }
    return out


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    """The settings that all rows of a run share, and the digest of each task's data where there is one."""
    shared = {name: value for name, value in rows[0]["settings"].items() if name not in ("method", "data")}
    data = {row["task"]: row["settings"]["data"] for row in rows if "data" in row["settings"]}
    return {**shared, "data": data} if data else shared


def _run(rows: list[Row]) -> dict[str, Any]:
    named, configs = labels(rows), {r["config"]: r["settings"]["method"] for r in rows}
    table: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        table[named[row["config"]], row["length"], row["task"]].append(row)
    lengths, tasks = (list(dict.fromkeys(key[i] for key in table)) for i in (1, 2))
    lengths.sort(key=lambda n: (n is None, n))
    methods = {name: configs[config] for config, name in named.items()}
    dense_name = next((name for name, config in methods.items() if not config), None)
    first = rows[0]
    out: dict[str, Any] = {
        **{name: first[name] for name in ("model", "benchmark", "compress")},
        "settings": _common(rows),
        "versions": sorted({json.dumps(r["versions"], sort_keys=True) for r in rows}),
        **{"dense": dense_name, "methods": methods, "lengths": lengths, "tasks": tasks, "rows": len(rows)},
        **{"cells": [], "by_length": [], "overall": []},
        **{"differences": _differences(rows, named, methods)},
        **{"by_op": _by_op(rows, named), "by_depth": _by_depth(rows, named)},
    }
    for method in methods:
        everything: dict[str, list[Row]] = {}
        all_dense: dict[str, dict[tuple, Row]] = {}
        compare = dense_name is not None and method != dense_name
        for length in lengths:
            mine = {t: table[method, length, t] for t in tasks if (method, length, t) in table}
            if not mine:
                continue
            dense = {t: {which(r): r for r in table.get((dense_name, length, t), [])} for t in mine}
            where = {"method": method, "length": length}
            for task, of_task in mine.items():
                cell = _cell({task: of_task}, dense if compare else None)
                out["cells"].append({**where, "task": task, **cell})
            out["by_length"].append({**where, **_cell(mine, dense if compare else None)})
            everything |= {f"{t}@{length}": r for t, r in mine.items()}
            all_dense |= {f"{t}@{length}": d for t, d in dense.items()}
        out["overall"].append({"method": method, **_cell(everything, all_dense if compare else None)})
    return out


def _differences(
    rows: Sequence[Row], named: Mapping[str, str], methods: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every method with a learned mask minus every other method, over all samples that both have."""
    table: dict[str, dict[str, dict[tuple, Row]]] = {name: defaultdict(dict) for name in methods}
    for row in rows:
        table[named[row["config"]]][f"{row['task']}@{row['length']}"][which(row)] = row
    learned = [name for name, config in methods.items() if config.get("channels", {}).get("name") == "leank"]
    found = []
    for method in learned:
        mine = {task: list(of_task.values()) for task, of_task in table[method].items()}
        for other in methods:
            difference = None if other == method else _difference(mine, table[other])
            if difference is not None:
                found.append({"method": method, "minus": other, **difference})
    return found


def _by_op(rows: Sequence[Row], named: Mapping[str, str]) -> list[dict[str, Any]]:
    """GSM-Infinite: accuracy (0-1) of each method by op, one group a subset and length."""
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["metric"] != "gsm_infinite" or "op" not in row["meta"]:
            continue
        subset = {2: "medium", 3: "hard"}.get(row["meta"].get("d"), "realistic")
        length = str(row["meta"].get("length", "")).upper()
        group = scores.setdefault(f"{subset} {length}".strip(), {}).setdefault(named[row["config"]], {})
        group.setdefault(str(row["meta"]["op"]), []).append(row["score"])
    return [
        {"name": name, "methods": {m: {op: float(np.mean(s)) for op, s in ops.items()} for m, ops in found.items()}}
        for name, found in scores.items()
    ]


def _by_depth(rows: Sequence[Row], named: Mapping[str, str]) -> list[dict[str, Any]]:
    """Needle in a haystack: mean score of each method by depth (lines) and length (columns)."""
    found: dict[tuple[str, str], dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["length"] is not None and "depth_percent" in row["meta"]:
            place = row["meta"]["depth_percent"], row["length"]
            found[named[row["config"]], row["task"]][place].append(100 * row["score"])
    maps = []
    for (method, task), cells in found.items():
        depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
        scores = [[_mean(cells.get((depth, length), ())) for length in lengths] for depth in depths]
        maps.append({"method": method, "task": task, "depths": depths, "lengths": lengths, "scores": scores})
    return maps
