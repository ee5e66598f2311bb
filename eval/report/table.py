"""A table of a report, before it becomes Markdown, HTML or LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TableLine:
    """A line of a table.

    cells: texts of its columns.
    shade: difference from dense of each cell, in points; None where there is none.
    published: whether a paper printed the figures.
    """

    cells: list[str]
    shade: list[float | None] = field(default_factory=list)
    published: bool = False


@dataclass
class ReportTable:
    """A table with its heading; `note` stands below it."""

    title: str
    head: list[str]
    lines: list[TableLine]
    note: str = ""
