"""Benchmarks whose samples are lines of files, cell by cell (eval.benchmarks.base).

Every line is checked against its schema, becomes a row and is scored once, with an empty reply, before any weights are
loaded.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

from annotated_types import MinLen

from leank.data_gen.reading import digest
from leank.eval.benchmarks.base import Cell, check_fits
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.scoring import score_row
from leank.eval.benchmarks.source import Line
from leank.typed import Checked, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Tasks = Annotated[Sequence[str], MinLen(1)]
Data = TypeVar("Data")  # what a line holds


@dataclass
class FromFiles(Checked, ABC, Generic[Data]):
    """A benchmark of files; its subclasses say how a line is read and built.

    path: where the data is; None asks the hub.
    samples: how many samples of each task are used, from the first on; None takes all.
    """

    path: str | None = None
    samples: Samples | None = None
    name: str = ""
    seed: Seed = 0
    _lines: dict[str, dict[str, Data]] = field(default_factory=dict, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)
    _reply: int | None = field(default=None, repr=False)

    cut = False  # whether prompts are cut to what the model's positions leave

    def wanted(self) -> Sequence[str]:
        """The tasks. Raises ValueError for an unknown one."""
        return [self.name]

    @abstractmethod
    def read(self, task: str) -> Iterable[Line]:
        """The task's lines, checked."""

    @abstractmethod
    def build(
        self, task: str, line: Data, tokenizer: PreTrainedTokenizerBase | None = None, max_length: int | None = None
    ) -> Row:
        """One line as a row."""

    def check(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, overhead: int, max_new_tokens: int | None
    ) -> None:
        """Read, build and score every line once; see `Benchmark.check`."""
        self._limit, self._reply = getattr(config, "max_position_embeddings", None), max_new_tokens
        self._check_source(self.wanted())
        for task in self.wanted():
            lines = list(self.read(task))
            if not lines:
                raise ValueError(f"benchmark.path={self.path}: {task} has no lines")
            rows = [self._tried(task, line) for line in lines]
            self._lines[task] = {str(number): line.data for number, line in enumerate(lines[: self.samples])}
            self._digests[task] = self._known_by(task, lines)
            if self.cut:
                self.row(Cell(task, None, ("0",)), "0", tokenizer, overhead)
            else:
                longest = max(rows[: self.samples], key=lambda row: len(row.prompt))
                check_fits(longest, tokenizer, overhead, self._limit, max_new_tokens)

    def _check_source(self, tasks: Sequence[str]) -> None:
        """Raise ValueError where one task's file is given for several tasks."""
        file = None if self.path is None else Path(self.path)
        if len(tasks) > 1 and file is not None and file.is_file() and file.suffix != ".zip":
            raise ValueError(
                f"benchmark.path={self.path} is the file of one task, and {len(tasks)} are to be run; name its task in "
                "benchmark.tasks, or give the folder of all files"
            )

    def _tried(self, task: str, line: Line) -> Row:
        """Build a row and score it once with an empty reply. Raises ValueError for a line that allows neither."""
        try:
            row = self.build(task, line.data)
            score_row(row, "")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            said = " ".join(str(error).split())[:200]
            raise line.error(f"it is no sample of {task} ({type(error).__name__}: {said})") from None
        return row

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        """Return a digest of what a task's lines hold, wherever they lie and however they are packed."""
        return digest("\n".join(json.dumps(line.data, sort_keys=True) for line in lines))

    @cached_property
    def _file(self) -> dict[str, str]:
        if self.path is None or not Path(self.path).is_file():
            return {}
        return {"file": hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:10]}

    def identity(self) -> dict[str, object]:
        """Return the digest of a single file; `data` tells the files of a folder or the hub apart, task by task."""
        return dict(self._file)

    def data(self, task: str) -> str | None:
        """Return what the task's data is known by; see `Benchmark.data`."""
        return None if self._file else self._digests[task]

    def cells(self) -> list[Cell]:
        """Return all cells in the order of the run."""
        return [Cell(task, None, tuple(lines)) for task, lines in self._lines.items()]

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        """Build one sample; see `Benchmark.row`."""
        line = self._lines[cell.task][sample]
        row = self.build(cell.task, line)
        if self.cut:
            limit = getattr(self, "max_length", None)
            if limit is None and self._limit is not None:
                reply = self._reply or row.max_new_tokens
                limit = self._limit - reply - overhead - 8  # the seam of a cut prompt may cost a token or two
            row = self.build(cell.task, line, tokenizer, limit)
        return replace(row, id=sample)


def known_tasks(
    tasks: Iterable[str], known: Mapping[str, object], where: str, plain: Callable[[str], str] = lambda task: task
) -> Sequence[str]:  # fmt: skip
    """Return the tasks. Raises ValueError for one that is not known. plain: the name that is looked up."""
    for task in (found := list(tasks)):
        if plain(task) not in known:
            raise ValueError(f"benchmark.tasks: {task!r} is not in {where}; choose from {', '.join(known)}")
    return found
