"""Scores of conversations by turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from leank.bootstrap import interval, mean
from leank.eval.report.groups import Variant, variant
from leank.eval.report.records import TurnScores
from leank.eval.rows.result_row import ResultRow


def by_turn(rows: Sequence[ResultRow], named: Mapping[Variant, str]) -> list[TurnScores]:
    """Scores of each method by turn, one group per mode and length; tasks count alike.

    named: the methods' names by `config`, see `eval.report.groups.labels`.
    """
    found: dict[tuple[str, int | None], dict[str, dict[int, dict[str, list[float]]]]] = {}
    for row in rows:
        meta = row["meta"]
        if "turn" not in meta or "mode" not in meta:
            continue
        group = found.setdefault((str(meta["mode"]), row["length"]), {})
        turns = group.setdefault(named[variant(row)], {})
        turns.setdefault(int(meta["turn"]), defaultdict(list))[row["task"]].append(100 * row["score"])
    return [
        {
            "mode": mode,
            "length": length,
            "methods": {
                method: [
                    {
                        "turn": turn,
                        "n": sum(map(len, tasks.values())),
                        "score": mean(list(tasks.values())),
                        "interval": interval(list(tasks.values())),
                    }
                    for turn, tasks in sorted(turns.items())
                ]
                for method, turns in methods.items()
            },
        }
        for (mode, length), methods in found.items()
    ]
