"""Recall of every method of a run, in all and by task, beside dense: a table as CSV, and as Markdown for a page.

    python -m scripts.bench.quality.by_task DIR [DIR ...] --out methods.csv

The CSV has a line for each method and task, and one for all tasks, which count alike; it leaves out seconds, which say
nothing where processes shared a GPU. Printed is the table as Markdown, best method first, and the layers that a method
selected. Rows of several folders are put together: a sample that stands in two must have one score.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from leank.cli import again, ending
from leank.eval.benchmarks.ruler import OFFICIAL
from leank.eval.methods.prefill.asl import NOWHERE
from leank.eval.report.groups import MARKED, group, labels, variant
from leank.eval.report.summary import Record, Run, summarise_groups
from leank.eval.report.tables import difference, mean, number
from leank.eval.rows.result_row import ResultRow, check_rows
from leank.eval.rows.results import Key, key_of, read
from leank.files import write_text

ALL = "all"  # the tasks together


def put_together(folders: Iterable[Path]) -> list[ResultRow]:
    """The rows of some runs, each sample once.

    Raises ValueError for a sample that two folders score differently, because one of them is of another program.
    """
    found: dict[Key, tuple[Path, ResultRow]] = {}
    for folder in folders:
        rows = list(read(folder))
        check_rows(rows)
        for row in rows:
            where, first = found.setdefault(key_of(row), (folder, row))
            if first["score"] != row["score"]:
                raise ValueError(
                    f"{row['method']}, {row['task']}, sample {row['sample']}: {first['score']:g} in {where}, "
                    f"{row['score']:g} in {folder}; take the rows of one of them out"
                )
    return [row for _, row in found.values()]


def summary(rows: Iterable[ResultRow]) -> Run:
    """Figures of a run, its tasks in RULER's order.

    Raises ValueError for rows of several models, lengths, benchmarks or other settings.
    """
    runs = summarise_groups(group(rows))["runs"]
    if len(runs) != 1 or len(runs[0]["lengths"]) != 1:
        raise ValueError("the rows are not of one model, one length and one set of settings; python -m eval report")
    runs[0]["tasks"].sort(key=lambda task: OFFICIAL.index(task) if task in OFFICIAL else len(OFFICIAL))
    return runs[0]


def layers(rows: Sequence[ResultRow]) -> dict[tuple[str, str], Counter[int]]:
    """How many samples selected which layer (`NOWHERE`: none), by method and task; without methods that do not."""
    found: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    named = labels(rows)
    for row in rows:
        if (at := row.get("selected_layer")) is not None:
            found[named[variant(row)], row["task"]][at] += 1
            found[named[variant(row)], ALL][at] += 1
    return found


def told(counts: Counter[int]) -> str:
    """Counts of layers in words: layer 5: 740, none: 60."""
    return ", ".join(f"{'none' if at == NOWHERE else f'layer {at}'}: {n}" for at, n in sorted(counts.items()))


def lines(run: Run, at: dict[tuple[str, str], Counter[int]]) -> list[dict[str, object]]:
    """Lines of the CSV: each method in all, then by task. Scores and differences are points, intervals 95%."""
    out: list[dict[str, object]] = []
    for whole in run["overall"]:
        mine = {cell["task"]: cell for cell in run["cells"] if cell["method"] == whole["method"]}
        cells: list[tuple[str, Record]] = [(ALL, whole), *((t, mine[t]) for t in run["tasks"] if t in mine)]
        for task, cell in cells:
            of = ("score", "score_low", "score_high", "difference", "difference_low", "difference_high")
            figures, share = [cell[name] for name in of], cell["share_of_dense"]
            names = ("score", "low", "high", "minus dense", "difference low", "difference high")
            out.append({
                "method": whole["method"], "task": task, "n": cell["n"],
                **{name: None if x is None else round(x, 2) for name, x in zip(names, figures, strict=True)},
                "share of dense": None if share is None else round(share / 100, 4),
                **{name.replace("_", " "): cell[name] for name in MARKED},
                "selected": told(at.get((whole["method"], task), Counter())),
            })  # fmt: skip
    return out


def table(run: Run) -> str:
    """The Markdown table: dense first, then by score; * marks a task of fewer samples than the others have."""
    cells = {(cell["method"], cell["task"]): cell for cell in run["cells"]}
    most = max(cell["n"] for cell in cells.values())
    ordered = sorted(run["overall"], key=lambda one: (one["method"] != run["dense"], -one["score"]))
    shown: list[list[str]] = []
    for one in ordered:
        by_task = [cells.get((one["method"], task)) for task in run["tasks"]]
        shown.append([
            one["method"], mean(one), difference(one),
            "" if one["share_of_dense"] is None else f"{one['share_of_dense']:.0f}%",
            *("" if c is None else number(c["score"], 0) + "*" * (c["n"] < most) for c in by_task),
        ])  # fmt: skip
    head = ["method", "score", "minus dense", "of dense", *(t.removeprefix("niah_") for t in run["tasks"])]
    return str(pd.DataFrame(shown, columns=head, dtype=object).to_markdown(index=False, disable_numparse=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of runs of python -m eval")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(argv)
    with ending("by_task", lambda: f"the rows are as they were; again: {again('scripts.bench.quality.by_task')}"):
        rows = put_together(given.folders)
        run, at = summary(rows), layers(rows)
        write_text(given.out, pd.DataFrame(lines(run, at), dtype=object).to_csv(index=False))
        print(table(run))
        for method, task in sorted(at, key=lambda one: (one[0], one[1] != ALL)):
            print(f"{method}, {task}: {told(at[method, task])}")


if __name__ == "__main__":
    main()
