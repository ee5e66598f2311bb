"""Benchmarks whose samples are lines of files, cell by cell (eval.benchmarks.base).

Every line becomes a row and is scored once, with an empty reply, before any weights are loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from eval.benchmarks import infinitebench, longbench, math500, mmlu
from eval.benchmarks.base import Cell, check_fits
from eval.benchmarks.row import Row
from eval.benchmarks.scoring import score_row
from leank_train.typed import Checked, Count, OneOf, Positive, Seed

Tasks = Annotated[Sequence[str], MinLen(1)]


@dataclass
class FromFiles(Checked, ABC):
    """path: where the data is; None asks the hub. samples: the first so many of each task, None = all."""

    path: str | None = None
    samples: Positive | None = None
    name: str = ""
    seed: Seed = 0
    _lines: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    _limit: int | None = field(default=None, repr=False)
    _reply: int | None = field(default=None, repr=False)

    cut = False  # whether prompts are cut to what the model's positions leave

    def wanted(self) -> Sequence[str]:
        """The tasks. Raises ValueError for an unknown one."""
        return [self.name]

    @abstractmethod
    def read(self, task: str) -> Iterable[Any]:
        """The task's lines."""

    @abstractmethod
    def build(self, task: str, line: Any, tokenizer: Any = None, max_length: int | None = None) -> Row:
        """One line as a row."""

    def check(self, config: Any, tokenizer: Any, overhead: int, max_new_tokens: int | None = None) -> None:
        """See `Benchmark.check`; reads all lines."""
        self._limit, self._reply = getattr(config, "max_position_embeddings", None), max_new_tokens
        for task in self.wanted():
            lines = {str(number): line for number, line in enumerate(self.read(task))}
            if not lines:
                raise ValueError(f"benchmark.path={self.path}: {task} has no lines")
            rows = [self._checked(task, number, line) for number, line in lines.items()]
            self._lines[task] = dict(list(lines.items())[: self.samples])
            if self.cut:
                self.row(Cell(task, None, ("0",)), "0", tokenizer, overhead)
            else:
                longest = max(rows[: self.samples], key=lambda row: len(row.prompt))
                check_fits(longest, tokenizer, overhead, self._limit, max_new_tokens)

    def _checked(self, task: str, number: str, line: Any) -> Row:
        try:
            row = self.build(task, line)
            score_row(row, "")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"benchmark.path={self.path}: line {int(number) + 1} of {task} is no sample of it ({error!r}); take it "
                "out, or give the data set's own file"
            ) from error
        return row

    def identity(self) -> dict[str, Any]:
        """A single file counts by its contents; of a folder or the hub the data set is trusted to be itself."""
        if self.path is None or not Path(self.path).is_file():
            return {}
        return {"file": hashlib.sha256(Path(self.path).read_bytes()).hexdigest()[:10]}

    def cells(self) -> list[Cell]:
        return [Cell(task, None, tuple(lines)) for task, lines in self._lines.items()]

    def row(self, cell: Cell, sample: str, tokenizer: Any, overhead: int) -> Row:
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
class LongBench(FromFiles):
    """path: .jsonl, .jsonl.gz, data.zip or a folder. tasks: official names; None takes those of `preset`.
    max_length: prompt tokens before truncation, None = what the model's positions leave."""

    tasks: Tasks | None = None
    preset: Annotated[str, OneOf(*longbench.PRESETS)] = "leank"
    max_length: Positive | None = None
    name: str = "longbench"

    cut = True

    def wanted(self) -> Sequence[str]:
        known = longbench.max_new_tokens()
        return _known(self.tasks or longbench.tasks(self.preset), known, "LongBench", lambda t: t.removesuffix("_e"))

    def read(self, task: str) -> Iterator[dict[str, Any]]:
        return longbench.read(task, self.path)

    def build(self, task: str, line: Any, tokenizer: Any = None, max_length: int | None = None) -> Row:
        return longbench.build_row(task, line, tokenizer, max_length)

    def identity(self) -> dict[str, Any]:
        return {"max_length": self.max_length, **super().identity()}


@dataclass
class InfiniteBench(FromFiles):
    """path: a folder of <task>.jsonl. tasks: official names, None = ASL's ten. style: "completion" or "chat", see
    eval.benchmarks.infinitebench. max_length: prompt tokens before truncation, None = what the positions leave."""

    tasks: Tasks | None = None
    style: Annotated[str, OneOf(*infinitebench.STYLES)] = "completion"
    max_length: Positive | None = None
    name: str = "infinitebench"

    cut = True

    def wanted(self) -> Sequence[str]:
        return _known(self.tasks or infinitebench.TASKS, infinitebench.assets()["max_new_tokens"], "InfiniteBench")

    def read(self, task: str) -> Iterator[dict[str, Any]]:
        return infinitebench.read(task, self.path)

    def build(self, task: str, line: Any, tokenizer: Any = None, max_length: int | None = None) -> Row:
        return infinitebench.build_row(task, line, tokenizer, max_length, self.style)

    def identity(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "style": self.style, **super().identity()}


@dataclass
class Math500(FromFiles):
    """path: test.jsonl of prm800k's math_splits, or its folder."""

    max_new_tokens: Positive = math500.MAX_NEW_TOKENS
    name: str = "math500"

    def read(self, task: str) -> Iterator[dict[str, Any]]:
        return math500.read(self.path)

    def build(self, task: str, line: Any, tokenizer: Any = None, max_length: int | None = None) -> Row:
        return math500.build_row(line, self.max_new_tokens)

    def identity(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, **super().identity()}


@dataclass
class Mmlu(FromFiles):
    """path: the folder of the official CSV files, or a .jsonl. tasks: subjects, None = Lethe's eight. shots: examples
    before the question. reasoning: generate reasoning of at most max_new_tokens; else one token, the letter."""

    tasks: Tasks | None = None
    shots: Count = 5
    reasoning: bool = True
    max_new_tokens: Positive = mmlu.MAX_NEW_TOKENS
    name: str = "mmlu"
    _dev: dict[str, list[mmlu.Question]] = field(default_factory=dict, repr=False)

    def wanted(self) -> Sequence[str]:
        return list(self.tasks or mmlu.LETHE)

    def read(self, task: str) -> Iterator[mmlu.Question]:
        self._dev[task] = list(mmlu.read(task, "dev", self.path))[: self.shots]
        if len(self._dev[task]) < self.shots:
            raise ValueError(
                f"benchmark.path={self.path}: {task} has {len(self._dev[task])} dev questions, benchmark.shots="
                f"{self.shots} needs more; lower shots, check the subject's name, or give the whole data set"
            )
        return iter(mmlu.read(task, "test", self.path))

    def build(self, task: str, line: Any, tokenizer: Any = None, max_length: int | None = None) -> Row:
        if self.reasoning:
            return mmlu.reasoning_row(task, self._dev[task], line, "", self.max_new_tokens)
        return mmlu.row_for(task, self._dev[task], line, "")

    def identity(self) -> dict[str, Any]:
        reply = self.max_new_tokens if self.reasoning else 1
        return {"shots": self.shots, "reasoning": self.reasoning, "max_new_tokens": reply, **super().identity()}


def _known(
    tasks: Iterable[str], known: Mapping[str, Any], where: str, plain: Any = lambda task: task
) -> Sequence[str]:  # fmt: skip
    """The tasks. Raises ValueError for one that is not known."""
    for task in (found := list(tasks)):
        if plain(task) not in known:
            raise ValueError(f"benchmark.tasks: {task!r} is not in {where}; choose from {', '.join(known)}")
    return found
