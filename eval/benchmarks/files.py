"""Benchmarks whose samples are lines of files, cell by cell (eval.benchmarks.base).

Every line is checked against its schema, becomes a row and is scored once, with an empty reply, before any weights are
loaded.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

from annotated_types import MinLen

from data_gen.reading import digest
from eval.benchmarks import infinitebench, longbench, math500, mmlu, schema
from eval.benchmarks.base import Cell, check_fits
from eval.benchmarks.row import Row
from eval.benchmarks.rules import checked
from eval.benchmarks.scoring import score_row
from eval.benchmarks.source import Line
from leank_train.common.typed import Checked, Count, OneOf, Positive, Samples, Seed

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
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        overhead: int,
        max_new_tokens: int | None = None,
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


@dataclass
class LongBench(FromFiles[longbench.LongBenchLine]):
    """LongBench v1.

    path: .jsonl, .jsonl.gz, data.zip or a folder of them.
    tasks: official names; None takes those of `preset`.
    preset: tasks of a paper's table.
    max_length: tokens above which a prompt is cut; None takes what the model's positions leave.
    """

    tasks: Tasks | None = None
    preset: Annotated[str, OneOf(*longbench.PRESETS)] = "leank"
    max_length: Positive | None = None
    name: str = "longbench"

    cut = True

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        known = longbench.max_new_tokens()
        return _known(self.tasks or longbench.tasks(self.preset), known, "LongBench", lambda t: t.removesuffix("_e"))

    def read(self, task: str) -> Iterator[Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(longbench.read(task, self.path), schema.longbench_line(task))

    def build(
        self,
        task: str,
        line: longbench.LongBenchLine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
    ) -> Row:
        """Build a row of one line."""
        return longbench.build_row(task, line, tokenizer, max_length)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_length": self.max_length, **super().identity()}


@dataclass
class InfiniteBench(FromFiles[infinitebench.InfiniteBenchLine]):
    """InfiniteBench.

    path: a folder of <task>.jsonl files.
    tasks: official names; None takes ASL's ten.
    style: "completion" or "chat", see eval.benchmarks.infinitebench.
    max_length: tokens above which a prompt is cut; None takes what the model's positions leave.
    """

    tasks: Tasks | None = None
    style: Annotated[str, OneOf(*infinitebench.STYLES)] = "completion"
    max_length: Positive | None = None
    name: str = "infinitebench"

    cut = True

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        return _known(self.tasks or infinitebench.TASKS, infinitebench.assets()["max_new_tokens"], "InfiniteBench")

    def read(self, task: str) -> Iterator[Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(infinitebench.read(task, self.path), schema.infinitebench_line(task))

    def build(
        self,
        task: str,
        line: infinitebench.InfiniteBenchLine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
    ) -> Row:
        """Build a row of one line."""
        return infinitebench.build_row(task, line, tokenizer, max_length, self.style)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_length": self.max_length, "style": self.style, **super().identity()}


@dataclass
class Math500(FromFiles[math500.Math500Line]):
    """MATH-500. path: test.jsonl of prm800k's math_splits, or its folder."""

    max_new_tokens: Positive = math500.MAX_NEW_TOKENS
    name: str = "math500"

    def read(self, task: str) -> Iterator[Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(math500.read(self.path), schema.math500_line())

    def build(
        self,
        task: str,
        line: math500.Math500Line,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
    ) -> Row:
        """Build a row of one line."""
        return math500.build_row(line, self.max_new_tokens)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_new_tokens": self.max_new_tokens, **super().identity()}


@dataclass
class Mmlu(FromFiles[mmlu.Question]):
    """MMLU.

    path: the folder of the official CSV files, or a .jsonl.
    tasks: subjects; None takes Lethe's eight.
    shots: examples before the question.
    reasoning: whether the reply is reasoning of at most max_new_tokens; else it is one token, the letter.
    """

    tasks: Tasks | None = None
    shots: Count = 5
    reasoning: bool = True
    max_new_tokens: Positive = mmlu.MAX_NEW_TOKENS
    name: str = "mmlu"
    _dev: dict[str, list[mmlu.Question]] = field(default_factory=dict, repr=False)

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        return list(self.tasks or mmlu.LETHE)

    def read(self, task: str) -> Iterator[Line]:
        """Yield the task's lines, checked against their schema."""
        dev = checked(mmlu.read(task, "dev", self.path), schema.mmlu_line())
        self._dev[task] = [line.data for line in dev][: self.shots]
        if len(self._dev[task]) < self.shots:
            raise ValueError(
                f"benchmark.path={self.path}: {task} has {len(self._dev[task])} dev questions, benchmark.shots="
                f"{self.shots} needs more; lower shots, check the subject's name, or give the whole data set"
            )
        return checked(mmlu.read(task, "test", self.path), schema.mmlu_line())

    def _check_source(self, tasks: Sequence[str]) -> None:
        """Accept any path, because one .jsonl holds all subjects."""

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        """Count the examples, too."""
        return digest(json.dumps(self._dev[task], sort_keys=True) + super()._known_by(task, lines))

    def build(
        self,
        task: str,
        line: mmlu.Question,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
    ) -> Row:
        """Build a row of one line."""
        if self.reasoning:
            return mmlu.reasoning_row(task, self._dev[task], line, "", self.max_new_tokens)
        return mmlu.row_for(task, self._dev[task], line, "")

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        reply = self.max_new_tokens if self.reasoning else 1
        return {"shots": self.shots, "reasoning": self.reasoning, "max_new_tokens": reply, **super().identity()}


def _known(
    tasks: Iterable[str], known: Mapping[str, object], where: str, plain: Callable[[str], str] = lambda task: task
) -> Sequence[str]:  # fmt: skip
    """Return the tasks. Raises ValueError for one that is not known. plain: the name that is looked up."""
    for task in (found := list(tasks)):
        if plain(task) not in known:
            raise ValueError(f"benchmark.tasks: {task!r} is not in {where}; choose from {', '.join(known)}")
    return found
