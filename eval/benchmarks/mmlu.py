"""MMLU: the questions of a subject with examples before them, and their rows.

Source: hendrycks/test, evaluate.py (MIT). Officially the reply is the likeliest of " A", " B", " C", " D" as next
token. That token comes from the prefill, so it says nothing about a decoding method; for one, generate reasoning and
read it with `eval.metrics.mmlu.extract_letter`.
Data: data.tar's folders dev and test of CSV files, a .jsonl, or cais/mmlu from the hub.
"""

from __future__ import annotations

import csv
import io
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NotRequired, TypedDict

from leank.data_gen.amount import amount
from leank.data_gen.reading import digest, read_text
from leank.eval.benchmarks import source
from leank.eval.benchmarks.base import benchmark
from leank.eval.benchmarks.from_files import FromFiles, Tasks
from leank.eval.benchmarks.prompting import Tokenizer
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.rules import FOUR_TEXTS, TEXT, Rule, Schema, checked, is_whole
from leank.eval.benchmarks.scoring import metric
from leank.eval.metrics.mmlu import extract_letter
from leank.typed import Count, Positive

LETTERS = "ABCD"
LETHE = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge"),
    *("college_biology", "college_chemistry", "college_computer_science"),
)
INSTRUCTION = 'Reason step by step. End with a line "The answer is (X).", where X is A, B, C or D.'
MAX_NEW_TOKENS = 32_768  # of reasoning; see eval.benchmarks.math500
REPO = "cais/mmlu"
SPLITS = ("dev", "test", "val", "validation", "train", "auxiliary_train")


class MmluLine(TypedDict):
    """A question. answer: a letter or 0-3; the question that is put to the model needs none."""

    question: str
    choices: Sequence[str]
    answer: NotRequired[str | int]


Question = MmluLine | Sequence[str]


@benchmark("mmlu")
@dataclass
class Mmlu(FromFiles[Question]):
    """MMLU.

    path: the folder of the official CSV files, or a .jsonl.
    tasks: subjects; None takes Lethe's eight.
    shots: examples before the question.
    reasoning: whether the reply is reasoning of at most max_new_tokens; else it is one token, the letter.
    """

    tasks: Tasks | None = None
    shots: Count = 5
    reasoning: bool = True
    max_new_tokens: Positive = MAX_NEW_TOKENS
    name: str = "mmlu"
    _dev: dict[str, list[Question]] = field(default_factory=dict, repr=False)

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        return list(self.tasks or LETHE)

    def read(self, task: str) -> Iterator[source.Line]:
        """Yield the task's lines, checked against their schema."""
        dev = checked(read(task, "dev", self.path), _SCHEMA)
        self._dev[task] = [line.data for line in dev][: self.shots]
        if len(self._dev[task]) < self.shots:
            found = amount(len(self._dev[task]), "dev question")
            raise ValueError(
                f"benchmark.path={self.path}: {task} has {found}, benchmark.shots="
                f"{self.shots} needs more; lower shots, check the subject's name, or give the whole data set"
            )
        return checked(read(task, "test", self.path), _SCHEMA)

    def _check_source(self, tasks: Sequence[str]) -> None:
        """Accept any path, because one .jsonl holds all subjects."""

    def _known_by(self, task: str, lines: Sequence[source.Line]) -> str:
        """Count the examples, too."""
        return digest(json.dumps(self._dev[task], sort_keys=True) + super()._known_by(task, lines))

    def build(
        self, task: str, line: Question, tokenizer: Tokenizer | None = None, max_length: int | None = None
    ) -> Row:
        """Build a row of one line."""
        if self.reasoning:
            return reasoning_row(task, self._dev[task], line, "", self.max_new_tokens)
        return row_for(task, self._dev[task], line, "")

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        reply = self.max_new_tokens if self.reasoning else 1
        return {"shots": self.shots, "reasoning": self.reasoning, "max_new_tokens": reply, **super().identity()}


def format_prompt(subject: str, dev_rows: Sequence[Question], row: Question) -> str:
    """The official few-shot prompt, ending in "Answer:".

    subject: with underscores, as in the file names (the double blank before it is official). dev_rows: the examples,
    5 officially. A row is a mapping with "question", "choices", "answer" (letter or 0-3; not needed in `row`), or a
    line of the official CSV [question, A, B, C, D, letter].
    """
    about = "".join(f" {word}" for word in subject.split("_"))
    header = f"The following are multiple choice questions (with answers) about {about}.\n\n"
    examples = "".join(f"{_ask(example)} {letter(example)}\n\n" for example in dev_rows)
    return header + examples + _ask(row)


def letter(row: Question) -> str:
    """The right letter of a row. Raises ValueError if the row names none."""
    answer = row["answer"] if isinstance(row, Mapping) else row[-1]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(LETTERS):
        return LETTERS[answer]
    if isinstance(answer, str) and answer in LETTERS and len(answer) == 1:
        return answer
    raise ValueError(f"MMLU answer {answer!r}: expected a letter A-D or 0-3")


def row_for(subject: str, dev_rows: Sequence[Question], row: Question, id: str, max_new_tokens: int = 1) -> Row:
    """One question as a `Row`; with the default of one token the reply is the letter alone."""
    prompt = format_prompt(subject, dev_rows, row)
    question = _ask(row)
    return Row(
        task=subject,
        id=id,
        context=prompt.removesuffix(question),
        question=question,
        answers=[letter(row)],
        max_new_tokens=max_new_tokens,
        metric="mmlu",
        chat=False,
    )


def reasoning_row(
    subject: str, dev_rows: Sequence[Question], row: Question, id: str, max_new_tokens: int = MAX_NEW_TOKENS
) -> Row:
    """Build the same prompt with a request to reason in place of the last "Answer:", for the chat template.

    Lethe does not print its prompt, so the wording is this project's.
    """
    plain = row_for(subject, dev_rows, row, id, max_new_tokens)
    question = plain.question.removesuffix("Answer:") + INSTRUCTION
    return replace(plain, question=question, chat=True)


def read(subject: str, split: str, path: str | Path | None = None) -> Iterator[source.Line]:
    """The questions of a subject's split, "dev" or "test".

    path: the folder that holds dev/ and test/ with the official CSV files, or a .jsonl (.gz) of lines with "split",
    "subject", "question", "choices" and "answer"; None asks the hub. Raises FileNotFoundError if there is none.
    """
    if path is None:
        yield from _from_hub(subject, split)
        return
    file = Path(path) / split / f"{subject}_{split}.csv"
    if Path(path).is_dir() and file.is_file():
        yield from _from_csv(file)
        return
    lines = source.read(f"MMLU {subject}", "mmlu", path, source.Hub(REPO, f"{split}/{subject}_{split}.csv"))
    for line in lines:
        where = line.data.get("subject"), line.data.get("split")
        if where[1] not in SPLITS:
            raise line.error(f'"split" is {reprlib.repr(where[1])}; it must be one of {", ".join(SPLITS)}')
        if not isinstance(where[0], str) or not where[0].strip():
            raise line.error(f'"subject" is {reprlib.repr(where[0])}; it must be a text that is not blank')
        if where == (subject, split):
            yield line


def _from_csv(file: Path) -> Iterator[source.Line]:
    """The lines of an official file, which has no header, as objects."""
    table = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        for fields in table:
            line = source.Line(str(file), table.line_num, None)
            if fields and len(fields) != 6:
                raise line.error(f"it has {amount(len(fields), 'field')}; a question, four choices and a letter are 6")
            if fields:
                question, *choices, answer = fields
                yield replace(line, data={"question": question, "choices": choices, "answer": answer})
    except csv.Error as error:
        raise source.Line(str(file), table.line_num, None).error(f"it is no CSV ({error})") from None


def _from_hub(subject: str, split: str) -> Iterator[source.Line]:
    try:
        from datasets import load_dataset

        found = load_dataset(REPO, subject, split=split)
        yield from (source.Line(f"{REPO}/{subject}/{split}", n, dict(data)) for n, data in enumerate(found, 1))
    except Exception as error:  # offline, blocked or moved: the way out is the same
        raise FileNotFoundError(
            f"MMLU {subject}: no path= given and {REPO} cannot be fetched from the hub ({str(error)[:200]}). Unpack "
            "https://people.eecs.berkeley.edu/~hendrycks/data.tar and pass path=<its folder data>"
        ) from error


def _ask(row: Question) -> str:
    if isinstance(row, Mapping):
        question, choices = row["question"], row["choices"]
    else:
        question, choices = row[0], row[1:-1]
    options = "".join(f"\n{mark}. {choice}" for mark, choice in zip(LETTERS, choices, strict=False))
    return f"{question}{options}\nAnswer:"


def _letter(value: object) -> bool:
    return (is_whole(value) and 0 <= value < 4) or (isinstance(value, str) and value in tuple(LETTERS))


_SCHEMA = Schema({"question": TEXT, "choices": FOUR_TEXTS, "answer": Rule("a letter A-D or a number 0-3", _letter)})


@metric("mmlu")
def score(row: Row, reply: str) -> float:
    """Whether the reply ends in the right letter, 0 or 1."""
    return float(extract_letter(reply) == row.answers[0])
