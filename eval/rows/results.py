"""results.jsonl: one row per model, method and sample, appended durably (`eval.rows.result_row` says what a row holds).

A row is complete on disk before the next begins: one write, then fsync. A kill can tear the last line only. The next
run cuts a torn line off and does its sample anew.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from leank.eval.rows.result_row import ResultRow
from leank.files import Lock, remove_partial, sync_folder

NAME = "results.jsonl"
GLOB = "results*.jsonl"
HOUR = 3600.0


class Key(NamedTuple):
    """What tells a row from every other; `ResultRow` describes the fields."""

    model: str
    method: str
    config: str
    benchmark: str
    task: str
    length: int | None
    sample: str
    seed: int
    compress: str


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a stored row. Raises KeyError if a field of the key is missing."""
    return Key._make(map(row.__getitem__, Key._fields))


class Results:
    """The open file of a run, of one process at a time, which knows the `keys` of all rows and appends new ones."""

    def __init__(self, directory: str | os.PathLike[str], part: str = "", folder: str = "hydra.run.dir") -> None:
        """Open or create the file, cut off a torn last line, and read the keys of all parts.

        part: ending of a shard's own file, such as "-0-of-4"; empty without shards.
        folder: what sets the directory, for the message to a second writer.
        Raises BlockingIOError if another run is writing here, ValueError for a damaged line in the middle.
        """
        self.path = Path(directory) / NAME.replace(".", f"{part}.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._new = not self.path.exists()
        busy = f"{self.path} is being written by another run; wait for it or choose another {folder}"
        self._lock = Lock(self.path, busy)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            self._cut_torn_line()
            self.keys = {key_of(row) for row in read(directory)}
            remove_partial(self.path.parent, HOUR)  # other shards may be writing a report
            if self._new:
                sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if not size:
            return
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as lines:
            keep = lines.rfind(b"\n") + 1
        if keep < size:
            os.ftruncate(self._file, keep)
            os.fsync(self._file)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row and wait until it is on disk. Raises ValueError for a row that is there already."""
        key = key_of(row)
        if key in self.keys:
            raise ValueError(f"this row is in {self.path} already: {key}")
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.keys.add(key)

    def close(self) -> None:
        """Close the file and let another process write it."""
        os.close(self._file)
        self._lock.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._new and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)  # a run that is refused leaves no file
        self.close()


class Collected:
    """Rows that stay in memory, where a caller of the replay wants no file; to `Job.run` they are as `Results`."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.rows: list[ResultRow] = []

    def append(self, row: ResultRow) -> None:
        """Keep one row."""
        self.keys.add(key_of(row))
        self.rows.append(row)


def read(path: str | os.PathLike[str]) -> Iterator[ResultRow]:
    """Yield the rows of a file, or of all files in a run directory (a shard each), but for a torn last line.

    Every row has a key; `eval.rows.result_row.check_rows` checks the other fields.
    Raises FileNotFoundError, or ValueError naming the line that is damaged or no row.
    """
    if Path(path).is_dir() and (parts := sorted(Path(path).glob(GLOB))):
        seen: set[Key] = set()
        for row in _in_turn(parts):
            if (key := key_of(row)) not in seen:  # two shards may have done the same row
                seen.add(key)
                yield row
        return
    file = Path(path) / NAME if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give the directory of a run of python -m leank.eval")
    yield from _read(file)


def _in_turn(parts: list[Path]) -> Iterator[ResultRow]:
    """Yield one task and length of each shard in turn, so that tables name tasks in the plan's order."""
    numbered = sorted(parts, key=lambda part: [int(n) for n in re.findall(r"\d+", part.name)])
    cells = ([list(rows) for _, rows in groupby(_read(p), lambda row: (row["task"], row["length"]))] for p in numbered)
    for dealt in zip_longest(*cells, fillvalue=()):
        for rows in dealt:
            yield from rows


def _read(file: Path) -> Iterator[ResultRow]:
    """Yield the rows of one file; those of equal settings or versions share one object, which saves much memory."""
    shared: dict[bytes, object] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = from_json(line)
                hash(key_of(row))
                for name in ("settings", "versions"):
                    if name in row:
                        row[name] = shared.setdefault(to_json(row[name], inf_nan_mode="constants"), row[name])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{file}, line {number} is no result row ({error!r}); take that line out and run again to redo it"
                ) from None
            yield row
