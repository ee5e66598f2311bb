"""MATH-500: 500 problems of MATH (Lightman et al. 2023; openai/prm800k, MIT), answered in reasoning.

The benchmark has no prompt of its own. The one here is usual for reasoning models: the problem as it is, then the
request to reason and to box the answer, which eval.metrics.math500 grades.
Data: test.jsonl of prm800k's math_splits, else HuggingFaceH4/MATH-500 from the hub (the same problems).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from leank.eval.benchmarks import source
from leank.eval.benchmarks.base import benchmark
from leank.eval.benchmarks.from_files import FromFiles
from leank.eval.benchmarks.prompting import Tokenizer
from leank.eval.benchmarks.row import Row, kept
from leank.eval.benchmarks.rules import NAME, TEXT, Schema, checked, optional
from leank.eval.benchmarks.scoring import metric
from leank.eval.metrics.math500 import grade, last_boxed
from leank.typed import Positive

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
MAX_NEW_TOKENS = 32_768  # Lethe does not say; what DeepSeek-R1, whose distilled models it uses, is evaluated with
_SCHEMA = Schema(
    {"problem": TEXT, "answer": TEXT, "subject": optional(TEXT), "level": optional(NAME), "unique_id": optional(NAME)},
    same=("unique_id",),
)


class Math500Line(TypedDict):
    """A line of the data set."""

    problem: str
    answer: str
    unique_id: NotRequired[str | int | None]
    subject: NotRequired[str | None]
    level: NotRequired[str | int | None]


@benchmark("math500")
@dataclass
class Math500(FromFiles[Math500Line]):
    """MATH-500.

    path: test.jsonl of prm800k's math_splits, or its folder.
    max_new_tokens: of a reply.
    """

    max_new_tokens: Positive = MAX_NEW_TOKENS
    name: str = "math500"

    def read(self, task: str) -> Iterator[source.Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(read(self.path), _SCHEMA)

    def build(
        self, task: str, line: Math500Line, tokenizer: Tokenizer | None = None, max_length: int | None = None
    ) -> Row:
        """Build a row of one line."""
        return build_row(line, self.max_new_tokens)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_new_tokens": self.max_new_tokens, **super().identity()}


def build_row(data: Math500Line, max_new_tokens: int = MAX_NEW_TOKENS) -> Row:
    """One line ("problem", "answer"; "unique_id", "subject", "level" are kept) as a `Row`."""
    if not isinstance(data["answer"], str):
        raise TypeError(f"the answer must be a text, got {data['answer']!r}")
    return Row(
        task="math500",
        id=str(data.get("unique_id", "")),
        context=data["problem"],
        question=f"\n{INSTRUCTION}",
        answers=[data["answer"]],
        max_new_tokens=max_new_tokens,
        metric="math500",
        meta=kept(data, "subject", "level"),
    )


def read(path: str | Path | None = None) -> Iterator[source.Line]:
    """The data set's lines; see `source.read`."""
    return source.read("MATH-500", "test", path, source.Hub("HuggingFaceH4/MATH-500", "test.jsonl"))


@metric("math500")
def score(row: Row, reply: str) -> float:
    """Whether the last boxed answer of the reply is right, 0 or 1."""
    return float(grade(last_boxed(reply), row.answers[0]))
