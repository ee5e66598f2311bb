"""Benchmarks whose samples are lines of files, cell by cell (eval.benchmarks.base).

Before any weights are loaded every line is checked against its schema, becomes a row, and is scored: with an empty
reply, and with its own answer, which has to score above 0.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import TypeAdapter

from leank.data_gen.reading import digest
from leank.eval.benchmarks.base import Cell, check_fits
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.scoring import score_row
from leank.eval.benchmarks.source import Line, checked
from leank.typed import Checked, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Tasks = Annotated[Sequence[str], MinLen(1)]


@dataclass
class FromFiles(Checked, ABC):
    """A benchmark of files; its subclasses say where lines are, what they must hold, and how they become rows.

    path: where the data is; None asks the hub.
    samples: how many samples of each task are used, from the first on; None takes all.
    """

    path: str | None = None
    samples: Samples | None = None
    name: str = ""
    seed: Seed = 0
    _lines: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)
    _reply: int | None = field(default=None, repr=False)

    schema: ClassVar[TypeAdapter[Any]]  # of a line
    same: ClassVar[tuple[str, ...]] = ()  # fields that name a sample, see `source.checked`
    cut: ClassVar[bool] = False  # whether prompts are cut to what the model's positions leave
    one_file: ClassVar[bool] = False  # whether the lines of several tasks may stand in one .jsonl

    def wanted(self) -> Sequence[str]:
        """The tasks. Raises ValueError for an unknown one."""
        return [self.name]

    @abstractmethod
    def lines(self, task: str) -> Iterator[Line]:
        """The task's lines, as they stand in the files."""

    @abstractmethod
    def build(
        self, task: str, data: Any, tokenizer: PreTrainedTokenizerBase | None = None, max_length: int | None = None
    ) -> Row:
        """One line as a row; its prompt is cut to `max_length` tokens of the tokenizer, where it can be.

        Raises ValueError for fields that are right one by one and not together.
        """

    def right(self, row: Row) -> Sequence[str]:
        """Replies of which one must score above 0; none where the official scorer may give the true answer 0."""
        return [str(answer) for answer in row.answers]

    def check(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, overhead: int, max_new_tokens: int | None
    ) -> None:
        """Read, build and score every line once; see `Benchmark.check`."""
        self._limit, self._reply = getattr(config, "max_position_embeddings", None), max_new_tokens
        tasks = self.wanted()
        file = None if self.path is None else Path(self.path)
        if len(tasks) > 1 and not self.one_file and file is not None and file.is_file() and file.suffix != ".zip":
            raise ValueError(
                f"benchmark.path={self.path} is the file of one task, and {len(tasks)} are to be run; name its task in "
                "benchmark.tasks, or give the folder of all files"
            )
        for task in tasks:
            lines = list(checked(self.lines(task), self.schema, self.same))
            if not lines:
                raise ValueError(f"benchmark.path={self.path}: {task} has no lines")
            rows = [tried(line, task, partial(self.build, task), self.right) for line in lines]
            self._lines[task] = {str(number): line.data for number, line in enumerate(lines[: self.samples])}
            self._digests[task] = self._known_by(task, lines)
            if self.cut:
                self.row(Cell(task, None, ("0",)), "0", tokenizer, overhead)
            else:
                longest = max(rows[: self.samples], key=lambda row: len(row.prompt))
                check_fits(longest, tokenizer, overhead, self._limit, max_new_tokens)

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
        data = self._lines[cell.task][sample]
        row = self.build(cell.task, data)
        if self.cut:
            limit = getattr(self, "max_length", None)
            if limit is None and self._limit is not None:
                reply = self._reply or row.max_new_tokens
                limit = self._limit - reply - overhead - 8  # the seam of a cut prompt may cost a token or two
            row = self.build(cell.task, data, tokenizer, limit)
        return replace(row, id=sample)


def tried(line: Line, task: str, build: Callable[[Any], Row], right: Callable[[Row], Sequence[str]]) -> Row:
    """Build a line's row and score it with an empty reply and with those that are right.

    right: replies of which one must score above 0; none asks for no such thing.
    Raises ValueError, naming the line, where any of that fails.
    """
    try:
        row = build(line.data)
        score_row(row, "")
        replies = right(row)
        if replies and not any(score_row(row, reply) > 0 for reply in replies):
            raise ValueError(f"its own answer {reprlib.repr(row.answers)} scores 0, so that no reply could be right")
        return row
    except ValueError as error:
        said = str(error)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
    raise line.error(f"it is no sample of {task}: {' '.join(said.split())[:300]}")
