"""Write a run's report beside its rows: summary.json, summary.md, tables.tex, cells.csv, plots, report.html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from leank.data_gen.amount import amount
from leank.escape import csv_text
from leank.escape import markdown as escaped
from leank.eval.report import plots, style
from leank.eval.report.fidelity import NEAR, near
from leank.eval.report.groups import group, labels
from leank.eval.report.html import title, to_html
from leank.eval.report.latex import document
from leank.eval.report.records import Summary
from leank.eval.report.summary import MARKED, summarise_groups
from leank.eval.report.tables import markdown, tables
from leank.eval.rows.results import read
from leank.files import write_bytes, write_text


def to_markdown(summary: Summary) -> str:
    """Make summary.md."""
    parts = []
    for run in summary["runs"]:
        count = f"{amount(run['rows'], 'row')}; tasks count alike."
        parts += [f"# {escaped(title(run))}", count, *map(markdown, tables(run))]
    return "\n\n".join(parts) + "\n"


def to_csv(summary: Summary) -> str:
    """Make cells.csv: one line per method, task and length."""
    names = ("model", "benchmark", "compress", "method", "task", "length", "n", "score", "low", "high", "difference",
             "difference_low", "difference_high", "cache_bytes", "first_token", "per_token", *MARKED,
             *NEAR)  # fmt: skip
    lines: list[Sequence[object]] = [names]
    for run in summary["runs"]:
        for cell in run["cells"]:
            against = cell.get("against_dense")
            gain = (against["difference"], *against["interval"]) if against else (None, None, None)
            lines.append([
                *(run["model"], run["benchmark"], run["compress"], cell["method"], cell["task"], cell["length"]),
                *(cell["n"], cell["score"], *cell["interval"]),
                *gain, cell["cache_bytes"],
                *(cell["seconds"]["first_token"], cell["seconds"]["per_token"]),
                *(cell[name] for name in MARKED),
                *near(cell).values(),
            ])  # fmt: skip
    return csv_text(lines)


def write_report(directory: Path, columns: Sequence[str] = ()) -> None:
    """Compute the report of the rows in `directory`.

    columns: labels of the methods that are compared with every other, in place of the learned masks.
    Raises FileNotFoundError or ValueError if there are no rows, if one of them is damaged or of an old form, or if no
    row is of a method in `columns`.
    """
    if directory.is_file():
        raise ValueError(f"{directory} is a file; give the directory that holds it")
    rows = list(read(directory))
    if not rows:
        raise ValueError(f"{directory} holds no rows yet; run python -m eval first")
    groups = group(rows)
    known = dict.fromkeys(name for some in groups for name in labels(some).values())
    for name in columns:
        if name not in known:
            raise ValueError(f"no row in {directory} is of a method {name!r}; its methods are {', '.join(known)}")
    summary = summarise_groups(groups, columns=list(dict.fromkeys(columns)))
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(directory / "summary.md", to_markdown(summary))
    write_text(directory / "tables.tex", document((title(run), t) for run in summary["runs"] for t in tables(run)))
    write_text(directory / "cells.csv", to_csv(summary))
    figures: list[list[tuple[str, str]]] = []
    for number, run in enumerate(summary["runs"]):
        drawn = []
        for name, (caption, _) in plots.FIGURES.items():
            figure = plots.draw(name, run)
            if figure is not None:
                ending = "" if number == 0 else f"_{number + 1}"
                write_bytes(directory / f"{name}{ending}.png", style.png(figure))
                drawn.append((caption, style.svg(figure, f"{name}-{number}")))
        figures.append(drawn)
    write_text(directory / "report.html", to_html(summary, groups, figures))
