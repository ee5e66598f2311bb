"""Recall of conversations by turn, with intervals by conversation, as a table of CSV.

    python -m scripts.bench.quality.turns DIR [DIR ...] --out multi_turn.csv

A report counts turns as independent samples. Here the mean of a conversation's turns is one number.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from leank.cli import again, ending
from leank.eval.rows.result_row import ResultRow, check_one_model, check_rows
from leank.eval.rows.results import read
from leank.files import write_text
from leank.stats import interval, mean

BOTH = "all"  # the tasks of a mode together, which count alike


def table(rows: Iterable[ResultRow]) -> list[dict[str, object]]:
    """A line for each mode, task and method: recall by turn and in all (0 to 100), its 95% interval, the cache's share.

    Raises ValueError where no row is of a conversation.
    """
    scores: dict[tuple[str, str], dict[str, dict[str, dict[int, float]]]] = defaultdict(dict)  # by task, sample, turn
    sizes: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # by task
    for row in rows:
        meta = row["meta"]
        if "turn" in meta and "mode" in meta:
            at, task = (str(meta["mode"]), row["method"]), row["task"].removesuffix(f"_{meta['mode']}")
            conversation = f"{row['length']} {row['seed']} {row['sample'].rpartition('.')[0]}"
            turns = scores[at].setdefault(task, {}).setdefault(conversation, {})
            turns[int(meta["turn"])] = 100 * row["score"]
            sizes[at][task].append(row["cache_bytes"]["total"])
    if not scores:
        raise ValueError("no row is of benchmark=multi_turn; give the directory of such a run")
    lines: list[dict[str, object]] = []
    for (mode, method), by_task in sorted(scores.items()):
        tasks = {BOTH: list(by_task), **{task: [task] for task in by_task}}
        for name, members in tasks.items():
            each = [[mean([list(turns.values())]) for turns in by_task[task].values()] for task in members]
            last = max(turn for task in members for turns in by_task[task].values() for turn in turns)
            by_turn = {
                f"turn {turn}": mean(
                    [[turns[turn] for turns in by_task[task].values() if turn in turns] for task in members]
                )
                for turn in range(1, last + 1)
            }
            low, high = interval(each)
            dense = [sizes[mode, "dense"].get(task, []) for task in members]
            share = mean([sizes[mode, method][task] for task in members]) / mean(dense) if all(dense) else None
            found = {**by_turn, "all": mean(each), "low": low, "high": high}
            lines.append({
                "mode": mode, "task": name, "method": method, **{key: round(value, 1) for key, value in found.items()},
                "conversations": sum(map(len, each)), "share of dense": None if share is None else round(share, 3),
            })  # fmt: skip
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="of runs with benchmark=multi_turn")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(argv)
    with ending("turns", lambda: f"the rows are as they were; again: {again('scripts.bench.quality.turns')}"):
        rows = [row for directory in given.directories for row in read(directory)]
        check_rows(rows)
        check_one_model(rows)
        write_text(given.out, pd.DataFrame(table(rows), dtype=object).to_csv(index=False))


if __name__ == "__main__":
    main()
