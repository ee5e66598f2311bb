"""MATH-500: 500 problems of MATH (Lightman et al. 2023; openai/prm800k, MIT), answered in reasoning.

The benchmark has no prompt of its own. The one here is usual for reasoning models: the problem as it is, then the
request to reason and to box the answer. A boxed answer is right if it is equal as text, or else for math_verify
(docs/compare/benchmarks.md has its differences from prm800k's grader).
Data: test.jsonl of prm800k's math_splits, else HuggingFaceH4/MATH-500 from the hub (the same problems).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, kept, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, read
from leank.eval.metrics import math_equal
from leank.typed import Positive

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
MAX_NEW_TOKENS = 32_768  # Lethe does not say; what DeepSeek-R1, whose distilled models it uses, is evaluated with


class Math500Line(TypedDict):
    """A line of the data set."""

    problem: NotBlank
    answer: NotBlank
    unique_id: NotRequired[str | int | None]
    subject: NotRequired[NotBlank | None]
    level: NotRequired[str | int | None]


@benchmark("math500")
@dataclass
class Math500(FromFiles):
    """MATH-500; path: test.jsonl of prm800k's math_splits, or its folder."""

    max_new_tokens: Positive = MAX_NEW_TOKENS  # of a reply
    name: str = "math500"

    schema = TypeAdapter(Math500Line)
    same = ("unique_id",)
    counted = ("max_new_tokens",)

    def lines(self, task: str) -> Iterator[Line]:
        return read("MATH-500", "test", self.path, Hub("HuggingFaceH4/MATH-500", "test.jsonl"))

    def build(self, task: str, data: Math500Line) -> Row:
        return Row(
            task="math500",
            id=str(data.get("unique_id", "")),
            context=data["problem"],
            question=f"\n{INSTRUCTION}",
            answers=[data["answer"]],
            max_new_tokens=self.max_new_tokens,
            metric="math500",
            meta=kept(data, "subject", "level"),
        )

    def right(self, row: Row) -> Sequence[str]:
        return [f"\\boxed{{{row.answers[0]}}}"]


def grade(given: str | None, truth: str) -> bool:
    """Whether the given answer is right; None is wrong, and so is one too long or too costly to compare."""
    if given is None:
        return False
    if given.strip() == truth.strip():
        return True
    if not given.strip() or max(len(given), len(truth)) > math_equal.MAX_EXPRESSION:
        return False
    return math_equal.equal(given, truth)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\\boxed{...}`` of a reply, braces balanced; None without one. Ours, for chat models."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 0
    for i, character in enumerate(rest if box else ""):
        if character == "}" and depth == 0:
            return rest[:i]
        depth += (character == "{") - (character == "}")
    return None


@metric("math500", states=last_boxed)
def score(row: Row, reply: str) -> float:
    """Whether the last boxed answer of the reply is right, 0 or 1."""
    return float(grade(last_boxed(reply), row.answers[0]))
