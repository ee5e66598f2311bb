"""Write the report of a run."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from leank.data_gen.amount import amount
from leank.errors import naming
from leank.eval.report import plots, style
from leank.eval.report.groups import frame, group, labels
from leank.eval.report.page import Section, page, replies_unlike_dense, title
from leank.eval.report.summary import summarise_groups
from leank.eval.report.tables import tables
from leank.eval.rows import read
from leank.files import write_bytes, write_text

LATEX = "% \\usepackage{booktabs,graphicx} in the preamble, \\input{tables.tex} in the text\n\n"


def write_report(directory: Path, columns: Sequence[str] = ()) -> None:
    """Compute the report of the rows in `directory`.

    columns: names of the methods that are compared with every other, in place of the learned masks.
    Raises FileNotFoundError or ValueError without rows, for a damaged one, and for an unknown method in `columns`.
    """
    if directory.is_file():
        raise ValueError(f"{directory} is a file; give the directory that holds it")
    rows = list(read(directory))
    if not rows:
        raise ValueError(f"{directory} holds no rows yet; run python -m leank.eval first")
    with naming(directory):
        groups = group(rows)
    known = dict.fromkeys(name for some in groups for name in labels(some).values())
    for name in columns:
        if name not in known:
            raise ValueError(f"no row in {directory} is of a method {name!r}; its methods are {', '.join(known)}")
    summary = summarise_groups(groups, list(dict.fromkeys(columns)))
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    markdown, latex, cells, sections, places = [], [], [], [], []
    for number, (run, some) in enumerate(zip(summary["runs"], groups, strict=True), 1):
        ending, about, made = "" if number == 1 else f"_{number}", title(run), tables(run)
        count = f"{amount(run['rows'], 'row')}; tasks count alike."
        markdown += [f"# {about}", count, *(table.markdown() for table in made)]
        latex += [table.latex(about) for table in made]
        of_run = {key: run[key] for key in ("model", "benchmark", "compress")}
        cells += [{**of_run, **cell} for cell in run["cells"]]
        places += [{**of_run, **record} for record in run["by_position"]]
        figures = []
        for name in plots.order(run):
            if (figure := plots.draw(name, run)) is not None:
                write_bytes(directory / f"{name}{ending}.png", style.png(figure))
                figures.append((plots.FIGURES[name][0], style.svg(figure, f"{name}-{number}")))
        few = min(cell["n"] for cell in run["cells"])
        warn = f" The smallest cell has {amount(few, 'sample')}: its interval says little." if few < 10 else ""
        shown = {name: run[name] for name in ("settings", "methods", "versions")}
        replies = replies_unlike_dense(frame(some), run["dense"])
        sections.append(Section(about, count + warn, made, figures, replies, settings=json.dumps(shown, indent=1)))
    write_text(directory / "summary.md", "\n\n".join(markdown) + "\n")
    write_text(directory / "tables.tex", LATEX + "\n".join(latex))
    write_text(directory / "cells.csv", pd.DataFrame(cells).astype({"length": "Int64"}).to_csv(index=False))
    if places:
        write_text(directory / "positions.csv", pd.DataFrame(places).to_csv(index=False))
    write_text(directory / "report.html", page(sections[0].title, sections))
