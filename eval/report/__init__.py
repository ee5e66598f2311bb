"""The report of a run, from its rows alone: summary.json, summary.md, tables.tex, cells.csv, plots, report.html."""

from leank.extras import require

require("leank.eval.report", "eval", "pandas", "matplotlib", "tabulate", "jinja2")

from leank.eval.report.diff import write_diff  # noqa: E402
from leank.eval.report.summary import summarise  # noqa: E402
from leank.eval.report.write import write_report  # noqa: E402

__all__ = ["summarise", "write_diff", "write_report"]
