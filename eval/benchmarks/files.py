"""LongBench, InfiniteBench, MATH500 and MMLU: which files hold their lines, and how a line becomes a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from data_gen.amount import amount
from data_gen.reading import digest
from eval.benchmarks import infinitebench, longbench, math500, mmlu, schema
from eval.benchmarks.from_files import FromFiles, Tasks
from eval.benchmarks.row import Row
from eval.benchmarks.rules import checked
from eval.benchmarks.source import Line
from leank_train.common.typed import Count, OneOf, Positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """MATH-500.

    path: test.jsonl of prm800k's math_splits, or its folder.
    max_new_tokens: of a reply.
    """

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
            found = amount(len(self._dev[task]), "dev question")
            raise ValueError(
                f"benchmark.path={self.path}: {task} has {found}, benchmark.shots="
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
