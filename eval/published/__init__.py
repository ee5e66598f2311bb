"""Figures that papers print, as data (leank.json), to set beside our own.

`average` is as printed; each table's `errata` say where that is not what its row gives.
"""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from typing import Any


@functools.cache
def tables() -> dict[str, Any]:
    """LeanK's tables by number: title, benchmark, scale, columns, errata, rows."""
    return json.loads(files("eval.published").joinpath("leank.json").read_text(encoding="utf-8"))["tables"]


def rows(table: str, model: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of a table for one model, such as "meta-llama/Llama-3.1-8B-Instruct"; where: further fields to match."""
    mine = _plain(model)
    return [
        row
        for row in tables()[table]["rows"]
        if _plain(row["model"]) == mine and all(row.get(name) == value for name, value in where.items())
    ]


def _plain(model: str) -> str:
    """A model's name without its owner: "Meta-Llama-3.1-8B-Instruct" and "llama-3.1-8b" are one."""
    return re.sub(r"^meta-|-instruct$", "", model.rstrip("/").rsplit("/", 1)[-1].lower())
