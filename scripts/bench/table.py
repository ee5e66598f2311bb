"""A CSV whose rows are measured one by one, and that a run which was killed goes on with."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.common import Record, write_rows

NO_ROOM = "does not fit"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch, a graph and Triton have a class of their own for it."""
    return "out of memory" in f"{error} {error.__context__}".lower()


def noted(error: Exception) -> str:
    """An error as a row has it."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{NO_ROOM}: {text}" if out_of_memory(error) else text


def final(row: Record) -> bool:
    """Whether nothing is left to measure: the row is whole, or what it asks for does not fit."""
    error = str(row.get("error") or "")
    return not error or error.startswith(NO_ROOM)


def read_table(path: Path) -> list[Record]:
    """Rows of a CSV by column."""
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


class Table:
    """The rows of a CSV, those of an earlier run included; what failed there is measured again.

    path: the file, in a folder that is made here.
    names: the columns that tell rows apart; columns: the others.
    """

    def __init__(self, path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.names, self.columns = path, names, columns
        self.rows = [row for row in read_table(path) if final(row)] if path.is_file() else []

    def has(self, *names: object) -> bool:
        """Whether the row of these names is there."""
        return any([str(row[n]) for n in self.names] == list(map(str, names)) for row in self.rows)

    def add(self, row: Record) -> None:
        """Take in a row, print it and write the file."""
        if "out of memory" in str(row.get("error", "")).lower() and not final(row):
            row["error"] = f"{NO_ROOM}: {row['error']}"
        self.rows.append(row)
        print(self.line(row), flush=True)
        every = (*self.names, *self.columns)
        write_rows(self.path, [{name: row.get(name, "") for name in every} for row in self.rows])

    def line(self, row: Record) -> str:
        """A row as one line: its names, numbers with their columns, and words."""
        named = " ".join(f"{row[name]!s:>{24 if name == self.names[0] else 8}}" for name in self.names)
        given = [(name, row.get(name)) for name in self.columns]
        shown = (f"{n} {v:.3f}" if isinstance(v, float) else f"{n} {v}" for n, v in given if v not in (None, ""))
        return "  ".join([named, *shown])
