"""The report of a run, from its rows alone."""

from eval.report.diff import write_diff
from eval.report.summary import summarise
from eval.report.write import write_report

__all__ = ["summarise", "write_diff", "write_report"]
