"""Rows of measurements as CSV, and a CSV whose rows are measured one by one, with which a killed run goes on."""

from __future__ import annotations

import csv
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from leank.files import write_text
from scripts.bench.common.timing import wait

NO_ROOM, TOO_SLOW, LOST = "does not fit", "too slow", "the GPU was lost"  # measured again only once the row is deleted

Record = dict[str, object]  # one row of a CSV; numbers, words, and what formats as such


def attempt(row: Record, work: Callable[[Record], None]) -> Record:
    """The row that `work` fills. A failure is printed and noted in the row, and costs the other rows nothing."""
    try:
        work(row)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def said(row: Mapping[str, object], digits: int = 3) -> str:
    """A row as one line: names and values, fractions with so many digits."""
    return "  ".join(f"{k} {v:.{digits}f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Rows as CSV, with the columns that any of them has."""
    write_text(path, pd.DataFrame(rows, dtype=object).to_csv(index=False))


def complain(rows: Iterable[Record], name: str) -> None:
    """Raise SystemExit with the `name` of rows that failed, if any did."""
    failed = [str(row[name]) for row in rows if row.get("error")]
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


class TooSlowError(Exception):
    """A row took longer than it may."""


@contextmanager
def within(limit: float) -> Iterator[None]:
    """Raise TooSlowError in a block of the main thread that takes more than `limit` seconds; 0 = no limit."""

    def ring(*_: object) -> None:
        raise TooSlowError(f"it took more than {limit:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def gpu_lost() -> bool:
    """Whether an error of the GPU keeps this process from using it again."""
    try:
        wait()
    except RuntimeError:
        return True
    return False


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch, a graph and Triton have a class of their own for it."""
    return "out of memory" in f"{error} {error.__context__}".lower()


def noted(error: Exception) -> str:
    """An error as a row has it."""
    return marked(f"{type(error).__name__}: {error}".splitlines()[0])


def marked(error: str) -> str:
    """An error with the word that says why it would come again."""
    if error.startswith((NO_ROOM, TOO_SLOW, LOST)):
        return error
    if "out of memory" in error.lower():
        return f"{NO_ROOM}: {error}"
    return error.replace(TooSlowError.__name__, TOO_SLOW)


def final(row: Record) -> bool:
    """Whether nothing is left to measure: the row is whole, or its error would come again."""
    error = str(row.get("error") or "")
    return not error or error.startswith((NO_ROOM, TOO_SLOW, LOST))


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
        if row.get("error"):
            row["error"] = marked(str(row["error"]))
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
