"""AIME 2024, 2025 and 2026: 30 problems a year, whose answers are integers from 0 to 999, answered in reasoning.

The contest has no prompt and no grader of its own. The prompt is that of MATH-500 here; a boxed answer is right if it
is the integer, with leading zeros or not (the contest writes 073), or equal to it as MATH-500's answers are.
Data: the user's own copy, AIME24.jsonl and so on, lines with "problem" (or "question") and "answer".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NotRequired

from annotated_types import Ge, Le
from pydantic import StringConstraints, TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, kept, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, read
from leank.eval.benchmarks.math500 import INSTRUCTION, MAX_NEW_TOKENS, grade, last_boxed
from leank.typed import Positive

TASKS = ("aime24", "aime25", "aime26")


class AimeLine(TypedDict):
    """A problem; its text is called problem or question."""

    problem: NotRequired[NotBlank]
    question: NotRequired[NotBlank]
    answer: Annotated[int, Ge(0), Le(999)] | Annotated[str, StringConstraints(pattern=r"^\s*[0-9]{1,3}\s*$")]
    id: NotRequired[str | int | None]


@benchmark("aime")
@dataclass
class Aime(FromFiles):
    """AIME; path: the folder of aime24.jsonl, aime25.jsonl and aime26.jsonl (.gz too), or the file of one task."""

    tasks: Tasks = TASKS
    max_new_tokens: Positive = MAX_NEW_TOKENS  # of a reply
    name: str = "aime"

    schema = TypeAdapter(AimeLine)
    same = ("problem",)
    counted = ("max_new_tokens",)

    def wanted(self) -> Sequence[str]:
        return known_tasks(self.tasks, TASKS, "is no year of AIME here")

    def lines(self, task: str) -> Iterator[Line]:
        if self.path is None:
            raise FileNotFoundError(
                f"AIME: no path= given, and no copy of {task} is fetched from the hub; put its problems, one JSON line "
                f'{{"problem": ..., "answer": ...}} each, into {task}.jsonl and pass path=<its folder>'
            )
        return read("AIME", task, self.path, Hub("no data set", f"{task}.jsonl"))

    def build(self, task: str, data: AimeLine) -> Row:
        problem = data.get("problem") or data.get("question")
        if problem is None:
            raise ValueError("it has neither problem nor question")
        return Row(
            task=task,
            id=str(data.get("id", "")),
            context=problem,
            question=f"\n{INSTRUCTION}",
            answers=[str(int(data["answer"]))],
            max_new_tokens=self.max_new_tokens,
            metric="aime",
            meta=kept(data, "id"),
        )

    def right(self, row: Row) -> Sequence[str]:
        return [f"\\boxed{{{row.answers[0]}}}"]


def stated(reply: str) -> str | None:
    """The last boxed answer of a reply, an integer without leading zeros; None without one."""
    found = last_boxed(reply)
    number = "" if found is None else found.strip()
    return str(int(number)) if number.isascii() and number.isdigit() and len(number) <= 3 else found


@metric("aime", states=stated)
def score(row: Row, reply: str) -> float:
    """Whether the last boxed answer of the reply is right, 0 or 1."""
    return float(grade(stated(reply), row.answers[0]))
