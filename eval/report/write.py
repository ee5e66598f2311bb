"""Writes a run's report beside its rows: summary.json, summary.md, plots, report.html."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eval.report.markdown import to_markdown
from eval.report.summary import summarise
from eval.results import read


def write_text(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_report(directory: Path) -> None:
    """Compute the report of the rows in `directory`. Raises FileNotFoundError or ValueError if there are none."""
    rows = list(read(directory))
    if not rows:
        raise ValueError(f"{directory} holds no rows yet; run python -m eval first")
    summary = summarise(rows)
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(directory / "summary.md", to_markdown(summary))
