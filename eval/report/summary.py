"""Numbers of a report (summary.json): means with bootstrap intervals, paired differences, bytes and times.

Intervals are computed in two passes: `Means` collects what is to be resampled, and one call draws them all.

`summarise` returns {"resamples", "level", "runs"}. A run holds the rows of one model, benchmark and `compress` that
differ in the method alone:

    model, benchmark, compress, settings, versions      what all its rows share, and the versions that made them
    dense               name of the method that differences are taken from; None if no row is of it
    methods             configuration of each method by its name
    lengths, tasks, rows
    cells, by_length, overall       figures of each method by task and length, by length, and of all
    differences         each method that is asked for, or has a learned mask, minus every other
    by_op, by_depth, by_turn        scores by op (GSM-Infinite), by depth (needle) and by turn (conversations)
    replies             length, cut and repetition of each method's replies
    by_position         methods by position in the replies that they read (`eval.report.position`): kl, top1, bytes,
                        tables, planned, dense_bytes, seconds a step, and repeated, % of its tokens that
                        end a 4-gram which the reply has had before; n replies are so long
    by_quarter          the same by quarter of each reply (0 to 3), and kl_more, the quarter's KL minus the first's
    sampled             pass@k and majority vote of each method (`eval.report.sampled`); empty where replies are greedy

The last eleven are lists of records, which pandas reads as tables. Scores, shares and their differences are in points,
0 to 100, and tasks and lengths count alike in a mean. NAME_low and NAME_high are the 95% interval of NAME. A figure is
None where no row has it. Where a sample has several replies, its figures are their means (avg@k), so that intervals and
differences are over samples, and it has a mark where any reply has it. Records of figures have

    n, score, prompt_tokens
    cache_bytes, allocated_bytes        mean bytes after the prompt, of the tensors and of the GPU's allocator
    prefill, seal, first_token, per_token       mean seconds
    not_compressed, dense_only, non_finite, not_selected        samples whose score says little (`tables.MARKS`)
    pairs, difference, same_reply, share_of_dense       of the samples that dense has, too: their number, points above
                        dense, % of equal replies, and the method's bytes in % of dense's
    share_of_middle     the middle's bytes, with scales and bounds, in % of what dense holds beside sink and window
    compared, tokens_compared, compared_non_finite      samples and next-token distributions compared with dense's, and
                        samples whose logits were NaN or infinite, which the next means leave out
    kl, top1, loss, loss_minus_dense    distance from dense (`eval.rows.Fidelity`)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from leank.eval.benchmarks.base import metrics_by_op
from leank.eval.report import position
from leank.eval.report.groups import MARKED, REPLY, SAMPLE, SECONDS, frame, group, labels, variant
from leank.eval.report.sampled import by_sample, sizes, votes
from leank.eval.rows import ResultRow
from leank.stats import DRAWS, LEVEL, intervals, mean

COLUMNS = 8  # learned masks that are compared unasked: pairs grow with their number, and no page is wider
Record = dict[str, Any]
Run = dict[str, Any]
Values = np.ndarray


class Means:
    """Means of strata: `add` writes one into a record, `draw` the intervals of all, NAME_low and NAME_high, at once."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Record, str, list[Values]]] = []

    def add(self, record: Record, name: str, strata: list[Values]) -> None:
        """Write the mean of some strata, None if there are none."""
        record |= {name: mean(strata) if strata else None, f"{name}_low": None, f"{name}_high": None}
        if strata:
            self._wanted.append((record, name, strata))

    def draw(self) -> None:
        """Write all intervals."""
        found = intervals([strata for *_, strata in self._wanted])
        for (record, name, _), (low, high) in zip(self._wanted, found, strict=True):
            record |= {f"{name}_low": low, f"{name}_high": high}


def strata(table: pd.DataFrame, name: str) -> list[Values]:
    """Return the values of a column by length and task (the column `cell`), without those that are missing."""
    values = table[name].to_numpy(float)
    there = ~np.isnan(values)
    return split(values[there], table["cell"].to_numpy()[there])


def split(values: Values, cells: Values) -> list[Values]:
    """Split values by their cells; those of a cell stand together."""
    return np.split(values, np.flatnonzero(np.diff(cells)) + 1) if len(values) else []


def summarise(rows: Iterable[ResultRow]) -> dict[str, Any]:
    """Compute everything that a report shows, see the module. Raises ValueError for a row that is unusable."""
    return summarise_groups(group(rows))


def summarise_groups(groups: Iterable[Sequence[ResultRow]], columns: Sequence[str] = ()) -> dict[str, Any]:
    """Compute `summarise` of grouped rows; columns: methods compared with every other, not the learned masks."""
    return {"resamples": DRAWS, "level": LEVEL, "runs": [_run(rows, columns) for rows in groups]}


def learned(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the methods that have a learned mask. methods: configurations by name."""
    return [name for name, config in methods.items() if config.get("channels", {}).get("name") == "leank"]


def _run(rows: Sequence[ResultRow], columns: Sequence[str]) -> Run:
    configs = {variant(row): row["settings"]["method"] for row in rows}
    methods = {name: configs[of] for of, name in labels(rows).items()}
    dense = next((name for name, config in methods.items() if not config), None)
    masks = learned(methods)
    compared = [name for name in columns or masks if name in methods] if columns or len(masks) <= COLUMNS else []
    replies = frame(rows)
    table = by_sample(_beside_dense(replies, dense))
    common = {name: value for name, value in rows[0]["settings"].items() if name not in ("method", "data")}
    if data := {row["task"]: row["settings"]["data"] for row in rows if "data" in row["settings"]}:
        common["data"] = data
    means = Means()
    run = {
        **{name: rows[0][name] for name in ("model", "benchmark", "compress")},
        "settings": common,
        "versions": sorted({json.dumps(row["versions"], sort_keys=True) for row in rows}),
        "dense": dense,
        "methods": methods,
        "lengths": [_plain(length) for length in sorted(table["length"].unique(), key=lambda n: (np.isnan(n), n))],
        "tasks": list(table["task"].cat.categories),
        "rows": len(rows),
        "cells": _figures(table, ["method", "length", "task"], means),
        "by_length": _figures(table, ["method", "length"], means),
        "overall": _figures(table, ["method"], means),
        "differences": _differences(table, compared, means),
        "by_op": _by_op(table),
        "by_depth": _by_depth(table),
        "by_turn": _by_turn(table, means),
        "replies": _replies(table, dense, means),
        "sampled": _sampled(replies, dense, means),
        **_along(position.by_block(table, dense), means),
    }
    means.draw()
    return run


def _plain(value: object) -> Any:
    """Return a value as JSON has it: None for NaN, and int for a length."""
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value == int(value) else float(value)
    return value


def _beside_dense(table: pd.DataFrame, dense: str | None) -> pd.DataFrame:
    """Add what dense has of each reply: points above it, whether replies are equal, and both bytes; NaN without it."""
    of_dense = table.loc[table["method"] == dense, [*REPLY, "score", "prediction", "cache_bytes"]]
    base = table[REPLY].merge(of_dense, on=REPLY, how="left")
    there = base["score"].notna().to_numpy() & (table["method"] != dense).to_numpy()
    return table.assign(
        difference=(table["score"] - base["score"]).where(there),
        same_reply=(100.0 * (table["prediction"] == base["prediction"])).where(there),
        paired_bytes=table["cache_bytes"].where(there),
        dense_bytes=base["cache_bytes"].where(there),
        dense_middle=(base["cache_bytes"] - table["ends_bytes"]).where(
            there & table["middle_bytes"].notna().to_numpy()
        ),
    )


def _groups(table: pd.DataFrame, by: Sequence[str]) -> Iterable[tuple[Record, pd.DataFrame]]:
    for key, part in table.groupby([*by], observed=True, dropna=False):
        yield {name: _plain(value) for name, value in zip(by, key, strict=True)}, part


def _average(values: pd.Series) -> float | None:
    there = values.to_numpy(float)
    there = there[~np.isnan(there)]
    return float(np.mean(there)) if len(there) else None


def _figures(table: pd.DataFrame, by: Sequence[str], means: Means) -> list[Record]:
    out = []
    for record, part in _groups(table, by):
        record["n"] = len(part)
        means.add(record, "score", strata(part, "score"))
        means.add(record, "difference", strata(part, "difference"))
        record["pairs"] = int(part["difference"].notna().sum())
        record["same_reply"] = _average(part["same_reply"])
        record["share_of_dense"] = (
            100 * float(part["paired_bytes"].sum() / part["dense_bytes"].sum()) if record["pairs"] else None
        )
        whole = float(part["dense_middle"].sum())
        record["share_of_middle"] = 100 * float(part["middle_bytes"].sum()) / whole if whole > 0 else None
        for name in ("cache_bytes", "allocated_bytes", "prompt_tokens", *SECONDS):
            record[name] = _average(part[name])
        for name in MARKED:
            record[name] = int(part[name].sum())
        record["compared"] = int(part["tokens_compared"].notna().sum())
        record["tokens_compared"] = int(part["tokens_compared"].sum())
        record["compared_non_finite"] = int(part["broken"].sum())
        for name in ("kl", "top1", "loss_minus_dense"):
            means.add(record, name, strata(part, name))
        losses = strata(part, "loss")
        record["loss"] = mean(losses) if losses else None
        out.append(record)
    return out


def _differences(table: pd.DataFrame, columns: Sequence[str], means: Means) -> list[Record]:
    """Compute each method of `columns` minus every other method, over all samples that both have."""
    out: list[Record] = []
    if not columns:
        return out
    scores = table.set_index(["cell", "sample", "seed", "method"])["score"].unstack("method")
    for method in columns:
        for other in scores.columns.drop(method):
            gain = (scores[method] - scores[other]).dropna()
            if len(gain):
                record: Record = {"method": method, "minus": other, "n": len(gain)}
                means.add(record, "difference", split(gain.to_numpy(), gain.index.get_level_values("cell").to_numpy()))
                out.append(record)
    return out


def _by_op(table: pd.DataFrame) -> list[Record]:
    """GSM-Infinite: mean score (0 to 1, as in the paper) of each method by subset, length and op."""
    rows = table[table["metric"].isin(metrics_by_op()) & table["meta_op"].notna()]
    subset = rows["meta_d"].map({2: "medium", 3: "hard"}).fillna("realistic")
    names = (subset + " " + rows["meta_length"].fillna("").astype(str).str.upper()).str.strip()
    rows = rows.assign(
        subset=pd.Categorical(names, names.unique()), op=rows["meta_op"].astype(int), fraction=rows["score"] / 100
    )
    return _means(rows, ["subset", "method", "op"], "fraction")


def _by_depth(table: pd.DataFrame) -> list[Record]:
    """Needle in a haystack: mean score of each method and task by length and depth of the needle."""
    rows = table[table["length"].notna() & table["meta_depth_percent"].notna()]
    return _means(rows.rename(columns={"meta_depth_percent": "depth"}), ["method", "task", "length", "depth"], "score")


def _means(rows: pd.DataFrame, by: Sequence[str], name: str) -> list[Record]:
    return [{**key, "n": len(part), "score": _average(part[name])} for key, part in _groups(rows, by)]


def _by_turn(table: pd.DataFrame, means: Means) -> list[Record]:
    """Conversations: mean score of each method by mode, length and turn; tasks count alike."""
    rows = table[table["meta_turn"].notna() & table["meta_mode"].notna()]
    rows = rows.rename(columns={"meta_mode": "mode", "meta_turn": "turn"})
    out = []
    for record, part in _groups(rows, ["mode", "length", "method", "turn"]):
        record["n"] = len(part)
        means.add(record, "score", strata(part, "score"))
        out.append(record)
    return out


def _replies(table: pd.DataFrame, dense: str | None, means: Means) -> list[Record]:
    """Tokens of a reply, and minus dense's; % of replies that are cut, and in a thought; % of 4-grams repeated."""
    base = table.loc[table["method"] == dense, [*SAMPLE, "new_tokens"]]
    out = []
    for record, part in _groups(table[table["cut"].notna()], ["method"]):
        record["n"] = len(part)
        for name in ("new_tokens", "cut", "in_thought", "repeated"):
            means.add(record, name, strata(part, name))
        both = part.merge(base, on=SAMPLE, how="left", suffixes=("", "_dense"))
        more = both.assign(more=both["new_tokens"] - both["new_tokens_dense"])
        means.add(record, "new_tokens_difference", strata(more, "more") if record["method"] != dense else [])
        out.append(record)
    return out


def _along(blocks: pd.DataFrame, means: Means) -> dict[str, list[Record]]:
    """Methods by position in what they read, and by quarter of it."""
    found: dict[str, list[Record]] = {"by_position": [], "by_quarter": []}
    if blocks.empty:
        return found
    for record, part in _groups(blocks, ["method", "position"]):
        record["n"] = len(part)
        for name in ("kl", "top1"):
            means.add(record, name, strata(part, name))
        for name in ("bytes", "tables", "planned", "dense_bytes", "seconds", "repeated"):
            record[name] = _average(part[name])
        found["by_position"].append(record)
    parts = position.by_quarter(blocks)
    if not parts.empty:
        first = parts.loc[parts["quarter"] == 0, ["method", *SAMPLE, "kl"]]
        both = parts.merge(first, on=["method", *SAMPLE], suffixes=("", "_first"))
        for record, part in _groups(both.assign(more=both["kl"] - both["kl_first"]), ["method", "quarter"]):
            record |= {"n": len(part), **{name: _average(part[name]) for name in ("seconds", "repeated")}}
            means.add(record, "kl", strata(part, "kl"))
            means.add(record, "top1", strata(part, "top1"))
            means.add(record, "kl_more", strata(part, "more") if record["quarter"] else [])
            found["by_quarter"].append(record)
    return found


def _sampled(table: pd.DataFrame, dense: str | None, means: Means) -> list[Record]:
    """Several replies a sample: pass@k and majority of each method, and the points by which they are above dense's."""
    if not table["reply"].any():
        return []
    found = votes(table)
    if found.empty:
        return []
    replies = 1 + int(table["reply"].max())
    names = [*(f"pass_{k}" for k in sizes(replies)), "majority"]
    base = found.loc[found["method"] == dense, [*SAMPLE, *names]]
    out = []
    for record, part in _groups(found, ["method"]):
        record |= {"n": len(part), "replies": replies}
        both = part.merge(base, on=SAMPLE, how="left", suffixes=("", "_dense"))
        for name in names:
            means.add(record, name, strata(part, name))
            gain = both.assign(gain=both[name] - both[f"{name}_dense"])
            means.add(record, f"{name}_difference", strata(gain, "gain") if record["method"] != dense else [])
        out.append(record)
    return out
