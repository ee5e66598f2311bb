"""Which rows belong together: those of one run, of one method, and of one sample."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leank.eval.rows.result_row import ResultRow, RowSettings, check_rows

Pair = tuple[ResultRow, ResultRow]
Variant = tuple[str, str]  # a method's label, and the digest of its settings


def group(rows: Iterable[ResultRow]) -> list[list[ResultRow]]:
    """Return the rows of each run, in order of appearance.

    A task may have been run on several data sets, told apart by the digest in its settings. Then the last one stands
    with the other tasks, and each earlier one makes a run of its own. A sample whose text spells special tokens belongs
    to the run of the other samples; if it was read in both ways, the row that read them as text counts. Of rows that
    differ in the tokens compared with dense, the one with most counts.

    Raises ValueError for a row that no report can be computed from.
    """
    rows = list(rows)
    check_rows(rows)
    runs: dict[tuple[str, ...], dict[tuple[object, ...], ResultRow]] = defaultdict(dict)
    written: dict[int, tuple[str, str]] = {}  # id of settings, which many rows share -> their texts
    for row in rows:
        if id(row["settings"]) not in written:
            written[id(row["settings"])] = _texts(row["settings"])
        common, method = written[id(row["settings"])]
        run = runs[row["model"], row["benchmark"], row["compress"], common]
        sample = (row["method"], method, row["task"], row["length"], row["settings"].get("data"), *which(row))
        if sample not in run or _rank(row) > _rank(run[sample]):
            run[sample] = row
    groups: dict[tuple[object, ...], list[ResultRow]] = defaultdict(list)
    for key, together in runs.items():
        known: dict[str, list[str | None]] = defaultdict(list)
        for row in together.values():
            if (data := row["settings"].get("data")) not in known[row["task"]]:
                known[row["task"]].append(data)
        for row in together.values():
            of_task = known[row["task"]]
            groups[key, len(of_task) - of_task.index(row["settings"].get("data"))].append(row)
    return list(groups.values())


def _texts(settings: RowSettings) -> tuple[str, str]:
    """Return the settings that the rows of a run share, and those of the method, as texts to compare."""
    common = {name: value for name, value in settings.items() if name not in ("method", "data", "specials", "fidelity")}
    return json.dumps(common, sort_keys=True), json.dumps(settings["method"], sort_keys=True)


def _rank(row: ResultRow) -> tuple[int, int]:
    """Order the ways in which a sample was read; the highest counts."""
    how = (None, "as_is", "text").index(row["settings"].get("specials"))
    return how, row["settings"].get("fidelity", 0)


def variant(row: ResultRow) -> Variant:
    """Return which method a row is of, and with which settings."""
    return row["method"], row["config"]


def labels(rows: Sequence[ResultRow]) -> dict[Variant, str]:
    """Return a name for every variant: the method's label, and the settings that differ if it has several.

    Settings that were chosen to match bytes (eval.run.matched) differ from cell to cell and are left out, also where
    a cell had nothing to match, and so are those of a choice within a choice that follow them, such as AdaKV's
    `tokens.scores_of.budget`.
    """
    found: dict[str, dict[Variant, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if variant(row) not in found[row["method"]]:
            found[row["method"]][variant(row)] = _flat(row["settings"]["method"])
    names = {}
    for label, variants in found.items():
        matched = {_setting(name) for flat in variants.values() for name in flat.get("matched.settings", ())}
        every = [
            {k: v for k, v in flat.items() if not (k.startswith("matched.") or _setting(k) in matched)}
            for flat in variants.values()
        ]
        differing = [k for k in dict.fromkeys(k for v in every for k in v) if len({repr(v.get(k)) for v in every}) > 1]
        for of, flat in zip(variants, every, strict=True):
            said = ", ".join(f"{name.rsplit('.', 1)[-1]}={flat[name]}" for name in differing if name in flat)
            names[of] = f"{label} ({said})" if differing else label
    return names


def _setting(name: str) -> tuple[str, str]:
    """Return the axis and the setting of a dotted name, without what is between."""
    return name.partition(".")[0], name.rpartition(".")[2]


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out


def which(row: ResultRow) -> tuple[str, int]:
    """Return what tells a row's sample from the others of its task and length."""
    return row["sample"], row["seed"]


def by_label(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Return the rows of every method, in order, as `labels` names the methods."""
    named = labels(rows)
    found: dict[str, list[ResultRow]] = {name: [] for name in named.values()}
    for row in rows:
        found[named[variant(row)]].append(row)
    return found


def paired(methods: Mapping[str, Sequence[ResultRow]], first: str, second: str) -> list[Pair]:
    """Return (row of `first`, row of `second`) for every sample that both methods have.

    methods: the rows of each, see `by_label`.
    """
    place = {(r["task"], r["length"], *which(r)): r for r in methods.get(first, ())}
    mine = [(place.get((r["task"], r["length"], *which(r))), r) for r in methods.get(second, ())]
    return [(a, b) for a, b in mine if a is not None]


def changed(methods: Mapping[str, Sequence[ResultRow]], first: str, second: str) -> list[Pair]:
    """Return the pairs of `paired` whose replies differ, the largest loss of `second` first."""
    differing = [(a, b) for a, b in paired(methods, first, second) if a["prediction"] != b["prediction"]]
    return sorted(differing, key=lambda pair: pair[1]["score"] - pair[0]["score"])
