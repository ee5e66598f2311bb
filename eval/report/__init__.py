"""The report of a run, from its rows alone."""

from leank.eval.report.diff import write_diff
from leank.eval.report.summary import summarise
from leank.eval.report.write import write_report

__all__ = ["summarise", "write_diff", "write_report"]
