"""Figures that papers print, as data (one JSON a paper), to set beside our own.

A table has `by`, what its columns are (task, length, op, subset, or the average alone). `average` is as printed; each
table's `errata` say where that is not what its row gives.
"""

import functools
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

PAPERS = {"leank": "LeanK", "think": "ThinK", "iap": "IAP", "asl": "ASL", "lethe": "Lethe"}


class Found(NamedTuple):
    """A published row: its label, its scores by column, the average if there is one, and its table's errata."""

    label: str
    scores: dict[str, float | None]
    average: float | None
    errata: list[str]


@functools.cache
def tables(paper: str = "leank") -> dict[str, Any]:
    """A paper's tables by number: title, benchmark, by, scale, columns, errata, rows."""
    return json.loads(files("leank.eval.published").joinpath(f"{paper}.json").read_text(encoding="utf-8"))["tables"]


def find(benchmark: str, by: str, model: str, **where: object) -> Iterator[Found]:
    """Every paper's rows for a benchmark and a model, such as "meta-llama/Llama-3.1-8B-Instruct".

    where: fields that a row must match if it has them, such as length=4096; None matches every value. Of a method
    that several tables of a paper repeat, the first one's row.
    """
    mine = _plain(model)
    for paper, name in PAPERS.items():
        seen = set()
        for number, table in tables(paper).items():
            if (table["benchmark"], table["by"]) != (benchmark, by):
                continue
            for row in table["rows"]:
                fits = all(value is None or row.get(field, value) == value for field, value in where.items())
                if _plain(row["model"]) == mine and fits and row["method"] not in seen:
                    seen.add(row["method"])
                    scores = dict(zip(table["columns"], row["scores"], strict=True))
                    label = f"{row['method']} ({name}, table {number})"
                    yield Found(label, scores, row["average"], table["errata"])


def _plain(model: str) -> str:
    """A model's name without its owner: "Meta-Llama-3.1-8B-Instruct" and "llama-3.1-8b" are one."""
    return re.sub(r"^meta-|-instruct$", "", model.rstrip("/").rsplit("/", 1)[-1].lower())
