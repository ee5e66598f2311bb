"""MMLU: the questions of a subject with examples before them, their rows and scores.

Source: hendrycks/test, evaluate.py (MIT). Officially the reply is the likeliest of " A", " B", " C", " D" as next
token. That token comes from the prefill, so it says nothing about a decoding method; for one, generate reasoning and
read it with `extract_letter`.
Data: data.tar's folders dev and test of CSV files, a .jsonl, or cais/mmlu from the hub.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Len, Lt
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.amount import amount
from leank.data_gen.reading import NotBlank, digest, read_text
from leank.eval.benchmarks.base import Row, benchmark, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, checked, from_hub, read
from leank.typed import Count, Positive

LETTERS = "ABCD"
LETHE = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge"),
    *("college_biology", "college_chemistry", "college_computer_science"),
)
INSTRUCTION = 'Reason step by step. End with a line "The answer is (X).", where X is A, B, C or D.'
MAX_NEW_TOKENS = 32_768  # of reasoning; see eval.benchmarks.math500
REPO = "cais/mmlu"
CURE = "Unpack https://people.eecs.berkeley.edu/~hendrycks/data.tar and pass path=<its folder data>"


class Question(TypedDict):
    """A question with its four choices and the right one's letter or number."""

    question: NotBlank
    choices: Annotated[list[NotBlank], Len(4, 4)]
    answer: Literal["A", "B", "C", "D"] | Annotated[int, Ge(0), Lt(4)]


class QuestionLine(Question):
    """A line of a .jsonl, which says where its question belongs."""

    subject: NotBlank
    split: Literal["dev", "test", "val", "validation", "train", "auxiliary_train"]


LINE = TypeAdapter(QuestionLine)


@benchmark("mmlu")
@dataclass
class Mmlu(FromFiles):
    """MMLU.

    path: the folder that holds dev/ and test/ with the official CSV files, or a .jsonl (.gz) of lines with "split",
        "subject", "question", "choices" and "answer".
    """

    tasks: Tasks | None = None  # subjects; None takes Lethe's eight
    shots: Count = 5  # examples before the question
    reasoning: bool = True  # whether the reply is reasoning of at most max_new_tokens; else it is one token, the letter
    max_new_tokens: Positive = MAX_NEW_TOKENS
    name: str = "mmlu"
    _dev: dict[str, list[Question]] = field(default_factory=dict, repr=False)

    schema = TypeAdapter(Question)
    one_file = True

    def wanted(self) -> Sequence[str]:
        return list(self.tasks or LETHE)

    def lines(self, task: str) -> Iterator[Line]:
        """Yield the subject's test questions, and keep its examples."""
        dev = checked(self._split(task, "dev"), self.schema)
        self._dev[task] = [line.data for line in dev][: self.shots]
        if len(self._dev[task]) < self.shots:
            found = amount(len(self._dev[task]), "dev question")
            raise ValueError(
                f"benchmark.path={self.path}: {task} has {found}, benchmark.shots="
                f"{self.shots} needs more; lower shots, check the subject's name, or give the whole data set"
            )
        return self._split(task, "test")

    def _split(self, subject: str, split: str) -> Iterator[Line]:
        """Yield the questions of a subject's split, "dev" or "test"."""
        if self.path is None:
            return from_hub(f"MMLU {subject}", REPO, subject, split, CURE)
        file = Path(self.path) / split / f"{subject}_{split}.csv"
        if file.is_file():
            return _from_csv(file)
        lines = read(f"MMLU {subject}", "mmlu", self.path, Hub(REPO, f"{split}/{subject}_{split}.csv"))
        return (x for x in checked(lines, LINE) if (x.data["subject"], x.data["split"]) == (subject, split))

    def _known_by(self, task: str, lines: Sequence[Line]) -> str:
        return digest(json.dumps(self._dev[task], sort_keys=True) + super()._known_by(task, lines))

    def build(self, task: str, data: Question) -> Row:
        """Build a row of one question with the official few-shot prompt (the double blank after "about" is official).

        With `reasoning` a request to reason takes the place of the last "Answer:", and the chat template is used. Lethe
        does not print its prompt, so that wording is this project's.
        """
        about = "".join(f" {word}" for word in task.split("_"))
        header = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        question = _ask(data)
        return Row(
            task=task,
            id="",
            context=header + "".join(f"{_ask(example)} {letter(example)}\n\n" for example in self._dev.get(task, ())),
            question=question.removesuffix("Answer:") + INSTRUCTION if self.reasoning else question,
            answers=[letter(data)],
            max_new_tokens=self.max_new_tokens if self.reasoning else 1,
            metric="mmlu",
            chat=self.reasoning,
        )

    def identity(self) -> dict[str, object]:
        reply = self.max_new_tokens if self.reasoning else 1
        return {"shots": self.shots, "reasoning": self.reasoning, "max_new_tokens": reply, **super().identity()}


def _ask(data: Question) -> str:
    options = "".join(f"\n{mark}. {choice}" for mark, choice in zip(LETTERS, data["choices"], strict=True))
    return f"{data['question']}{options}\nAnswer:"


def letter(data: Question) -> str:
    """Return the right letter of a question."""
    return data["answer"] if isinstance(data["answer"], str) else LETTERS[data["answer"]]


def _from_csv(file: Path) -> Iterator[Line]:
    """The lines of an official file, which has no header, as objects."""
    table = csv.reader(io.StringIO(read_text(file), newline=""))
    for row in filter(None, table):
        yield Line(str(file), table.line_num, {"question": row[0], "choices": row[1:-1], "answer": row[-1]})


def extract_letter(reply: str) -> str | None:
    """The last "answer is (X)" or "Answer: X" of a reply, else a leading letter; not official, but this project's."""
    # possessive quantifiers give nothing back, so that a long run of blanks is read once
    stated = re.findall(r"(?i:answer)\s*+(?i:is)?+\s*+:?+\s*+\**+\(?+([A-D])\b", reply)
    if stated:
        return str(stated[-1])
    leading = re.match(r"\s*\(?([A-D])\b", reply)
    return leading[1] if leading else None


@metric("mmlu", states=extract_letter)
def score(row: Row, reply: str) -> float:
    """Whether the reply ends in the right letter, 0 or 1."""
    return float(extract_letter(reply) == row.answers[0])
