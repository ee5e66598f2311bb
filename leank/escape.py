"""Text from data (labels, task names, replies) in files that others interpret: CSV for spreadsheets, and Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number

PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Where a spreadsheet may begin a cell: at the start, and after the separators that it may take for the comma.
FORMULA = re.compile(r"(\A|[;\t\r\n])(?=[\s\"']*[=+\-@\uff1d\uff0b\uff0d\uff20])|\A(?=[\t\r\n])")
ALWAYS = re.compile(r"[\\`*|<>~$]")
# an entity, an underscore that may begin or end emphasis, the target of a link, an address that is a link by itself
SOMETIMES = re.compile(r"&(?=[#\w])|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|:(?=//)|(?<=www)\.", re.IGNORECASE)


def csv_cell(value: object) -> object:
    """A value for a cell of a CSV file: numbers and None as they are, else its text, which no spreadsheet runs.

    A text that a spreadsheet could take for a formula gets an apostrophe before it, which spreadsheets read as "text".
    """
    if value is None or isinstance(value, Number):
        return value
    text = str(value)
    return text if PLAIN_NUMBER.fullmatch(text) else FORMULA.sub(r"\g<0>'", text)


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines of values as CSV; each value goes through `csv_cell`."""
    return "".join(_csv_line(line) for line in lines)


def csv_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as CSV, under the names that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text([names, *([row.get(name) for name in names] for row in rows)])


def _csv_line(values: Iterable[object]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow(map(csv_cell, values))  # with "\n" alone it leaves "\r" unquoted
    return out.getvalue()[:-2] + "\n"


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    one_line = "".join(c if c.isprintable() else " " for c in text)
    return SOMETIMES.sub(r"\\\g<0>", ALWAYS.sub(r"\\\g<0>", one_line))


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers and stand on the right."""
    rule = "| " + " | ".join(["---"] + ["---:"] * (len(head) - 1)) + " |"
    first, *rest = ("| " + " | ".join(map(markdown, line)) + " |" for line in (head, *lines))
    return "\n".join([first, rule, *rest])
