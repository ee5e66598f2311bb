"""Which rows belong together (those of one run, of one method, of one sample), and a run's rows as one DataFrame."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from leank.eval.rows import ResultRow, RowSettings, check_rows

Variant = tuple[str, str]  # a method's label, and the digest of its settings
SAMPLE = ["cell", "length", "task", "sample", "seed"]  # columns that tell a sample from every other of its run
REPLY = [*SAMPLE, "reply"]  # and a reply from every other
SECONDS = ("prefill", "seal", "first_token", "per_token")
FIGURES = ("length", "allocated_bytes", "middle_bytes", *SECONDS, "tokens_compared", "kl", "top1", "loss", "dense_loss",
           "new_tokens", "cut", "in_thought", "repeated")  # fmt: skip
MIDDLE, ENDS = ("middle_k", "middle_v", "extra"), ("sink", "window", "other")  # parts of a cache's bytes
MARKED = ("not_compressed", "dense_only", "non_finite", "not_selected")  # samples whose score says less than it seems
COPIED = ("task", "sample", "seed", "metric", "prediction", "answers", "length", "prompt_tokens")
META = ("op", "d", "length", "depth_percent", "turn", "mode")  # of a row's `meta`: what tables group by


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
        data = row["settings"].get("data")
        which = (row["task"], row["length"], row["sample"], row["seed"], row.get("reply", 0))
        sample = (row["method"], method, data, *which)
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

    Settings that were chosen to match bytes (`match=`) differ from cell to cell and are left out, also where a cell had
    nothing to match, and so are those of a choice within a choice that follow them, such as AdaKV's
    `tokens.scores_of.budget`.
    """
    found: dict[str, dict[Variant, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if variant(row) not in found[row["method"]]:
            found[row["method"]][variant(row)] = flat(row["settings"]["method"])
    names = {}
    for label, variants in found.items():
        matched = {_setting(name) for one in variants.values() for name in one.get("matched.settings", ())}
        every = [
            {k: v for k, v in one.items() if not (k.startswith("matched.") or _setting(k) in matched)}
            for one in variants.values()
        ]
        differing = [k for k in dict.fromkeys(k for v in every for k in v) if len({repr(v.get(k)) for v in every}) > 1]
        for of, one in zip(variants, every, strict=True):
            said = ", ".join(f"{name.rsplit('.', 1)[-1]}={one[name]}" for name in differing if name in one)
            names[of] = f"{label} ({said})" if differing else label
    return names


def _setting(name: str) -> tuple[str, str]:
    """Return the axis and the setting of a dotted name, without what is between."""
    return name.partition(".")[0], name.rpartition(".")[2]


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return out


def frame(rows: Sequence[ResultRow]) -> pd.DataFrame:
    """Return a run's rows as a table, sorted by method, length and task; scores and shares are 0 to 100.

    `method` (as `labels` names it) and `task` are categories in order of appearance, and `cell` is the number of a
    row's length and task. Figures that a row lacks are NaN.
    `kl`, `top1`, `loss` and `loss_minus_dense` are NaN, too, where logits were NaN or infinite (`broken`).
    """
    named = labels(rows)
    table = pd.DataFrame([_line(row, named[variant(row)]) for row in rows])
    for name, order in (("method", named.values()), ("task", table["task"])):
        table[name] = pd.Categorical(table[name], list(dict.fromkeys(order)))
    table[[*FIGURES]] = table[[*FIGURES]].astype(float)  # None is NaN
    table["loss_minus_dense"] = table["loss"] - table["dense_loss"]
    table["cell"] = table.groupby(["length", "task"], observed=True, dropna=False).ngroup()
    return table.sort_values(["method", "cell"], kind="stable", ignore_index=True)


def _line(row: ResultRow, method: str) -> dict[str, Any]:
    near: Mapping[str, Any] = row["fidelity"] or {}
    held = row["cache_bytes"]
    broken = near.get("non_finite") is not None
    whole = {} if broken else near
    losses = whole if None not in (whole.get("loss"), whole.get("dense_loss")) else {}
    return {
        "method": method,
        **{name: row[name] for name in COPIED},  # type: ignore[literal-required]
        "reply": row.get("reply", 0),
        "stated": row.get("stated"),
        "votes": "stated" in row,
        "new_tokens": row["new_tokens"],
        "cut": 100.0 * (row["cut"] is not None) if "cut" in row else None,
        "in_thought": 100.0 * (row["cut"] == "thought") if "cut" in row else None,
        "repeated": 100 * row["repeated"] if "repeated" in row else None,
        "score": 100 * row["score"],
        "cache_bytes": row["cache_bytes"]["total"],
        "allocated_bytes": row["cache_bytes"].get("allocated"),
        "middle_bytes": sum(held[name] for name in MIDDLE) if held.keys() >= {*MIDDLE} else None,
        "ends_bytes": sum(held.get(name, 0) for name in ENDS),
        **{name: row["seconds"].get(name) for name in SECONDS},
        "not_compressed": row["compressed"] is False,
        "dense_only": row["dense_only"] and bool(row["settings"]["method"]),
        "non_finite": row["non_finite"] is not None,
        "not_selected": row["selected_layer"] == -1,
        **{f"meta_{name}": row["meta"].get(name) for name in META},
        "tokens_compared": near.get("tokens"),
        "broken": broken,
        "kl": whole.get("kl"),
        "top1": 100 * whole["top1"] if whole else None,
        "along": whole.get("along"),
        "loss": losses.get("loss"),
        "dense_loss": losses.get("dense_loss"),
    }


def paired(table: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Return a line for every reply of both methods, in the order of `second`; columns end in _first and _second."""
    a, b = (table[table["method"] == name] for name in (first, second))
    return b.merge(a, on=REPLY, suffixes=("_second", "_first"))


def changed(table: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Return the lines of `paired` whose replies differ, the largest loss of `second` first."""
    pairs = paired(table, first, second)
    gain = (pairs["score_second"] - pairs["score_first"])[pairs["prediction_first"] != pairs["prediction_second"]]
    return pairs.loc[gain.sort_values(kind="stable").index]
