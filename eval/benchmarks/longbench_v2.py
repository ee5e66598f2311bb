"""LongBench v2: 503 questions on long documents, each with four choices.

Source: THUDM/LongBench 2e00731, pred.py and prompts/0shot.txt (MIT; the prompt is unchanged). Data: data.json of
zai-org/LongBench-v2, in a folder or from the hub, or a .jsonl of the same fields.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, kept, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, checked, read
from leank.typed import Positive

HUB = Hub("zai-org/LongBench-v2", "data.json")
TASKS = ("all", "easy", "hard", "short", "medium", "long")  # the columns of the official table
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = """
</text>

What is the correct answer to this question: {}
Choices:
(A) {}
(B) {}
(C) {}
(D) {}

Format your response as follows: "The correct answer is (insert answer here)"."""


class LongBenchV2Line(TypedDict):
    """A question with its document."""

    context: NotBlank
    question: NotBlank
    choice_A: NotBlank
    choice_B: NotBlank
    choice_C: NotBlank
    choice_D: NotBlank
    answer: Literal["A", "B", "C", "D"]
    difficulty: Literal["easy", "hard"]
    length: Literal["short", "medium", "long"]
    domain: NotRequired[NotBlank | None]
    sub_domain: NotRequired[NotBlank | None]
    _id: NotRequired[str | int | None]


@benchmark("longbench_v2")
@dataclass
class LongBenchV2(FromFiles):
    """LongBench v2; path: data.json, a .jsonl or .jsonl.gz, or a folder of one."""

    tasks: Tasks = ("all",)  # all; or easy and hard; or short, medium and long
    # tokens above which a prompt is cut; None takes what the model's positions leave
    max_length: Positive | None = None
    name: str = "longbench_v2"

    schema = TypeAdapter(LongBenchV2Line)
    same = ("_id",)
    cut = True
    counted = ("max_length",)
    one_file = True

    def wanted(self) -> Sequence[str]:
        return known_tasks(self.tasks, TASKS, "is no part of LongBench v2")

    def lines(self, task: str) -> Iterator[Line]:
        """Yield the questions of a difficulty or a length; see `from_files.read`."""
        lines = checked(read("LongBench v2", "longbench_v2", self.path, HUB), self.schema)
        return (line for line in lines if task in ("all", line.data["difficulty"], line.data["length"]))

    def build(self, task: str, data: LongBenchV2Line) -> Row:
        """Build a row of one question with the official prompt without reasoning."""
        asked = (data["question"], data["choice_A"], data["choice_B"], data["choice_C"], data["choice_D"])
        return Row(
            task=task,
            id=str(data.get("_id", "")),
            context=BEFORE + data["context"].strip(),
            question=AFTER.format(*(text.strip() for text in asked)),
            answers=[data["answer"]],
            max_new_tokens=128,
            metric="longbench_v2",
            meta=kept(data, "difficulty", "length", "domain", "sub_domain"),
        )

    def right(self, row: Row) -> Sequence[str]:
        return [f"The correct answer is ({row.answers[0]})"]


def stated_letter(reply: str) -> str | None:
    """The first letter that a reply states: one in brackets, else one without; None if there is none."""
    bare = reply.strip().replace("*", "")
    stated = re.search(r"The correct answer is \(([A-D])\)", bare) or re.search(r"The correct answer is ([A-D])", bare)
    return None if stated is None else stated[1]


@metric("longbench_v2", states=stated_letter)
def score(row: Row, reply: str) -> float:
    """Whether the letter that the reply states is right, 0 or 1."""
    return float(stated_letter(reply) == row.answers[0])
