"""InfiniteBench: prompts, truncation and rows of its twelve tasks; ASL reports ten.

Source: OpenBMB/InfiniteBench 88b3daa, src/prompt.py and src/eval_utils.py (MIT; prompts unchanged in assets/). ASL uses
the copy in MInference, which gives every open model the prompts made for YaRN-Mistral, without a chat template, and
reads the published files: that is the style "completion"; "chat" are the prompts made for GPT-4.
Data: <task>.jsonl files in a folder, else from the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from leank.eval.benchmarks import source
from leank.eval.benchmarks.base import benchmark
from leank.eval.benchmarks.from_files import FromFiles, Tasks, known_tasks
from leank.eval.benchmarks.mmlu import LETTERS
from leank.eval.benchmarks.prompting import Tokenizer, fill
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.rules import (
    ANY_TEXT,
    FOUR_TEXTS,
    NAME,
    TEXT,
    Rule,
    Schema,
    alone,
    checked,
    is_digits,
    is_number,
    is_text_or_texts,
    is_whole,
    optional,
)
from leank.eval.benchmarks.scoring import metric
from leank.eval.metrics import infinitebench
from leank.typed import OneOf, Positive

REPO = "xinrongzhang2022/InfiniteBench"
TASKS = (
    *("longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "longdialogue_qa_eng", "longbook_qa_chn"),
    *("code_debug", "math_find", "passkey", "number_string", "kv_retrieval"),
)
STYLES = ("completion", "chat")
CHOICES = ("longbook_choice_eng", "code_debug")


class InfiniteBenchLine(TypedDict):
    """A published line. answer: a text, a number or a list; options: four texts, of multiple choice alone."""

    context: str
    input: str
    answer: object
    options: NotRequired[list[object]]
    id: NotRequired[str | int | None]


@benchmark("infinitebench")
@dataclass
class InfiniteBench(FromFiles[InfiniteBenchLine]):
    """InfiniteBench.

    path: a folder of <task>.jsonl files.
    tasks: official names; None takes ASL's ten.
    style: "completion" or "chat", see above.
    max_length: tokens above which a prompt is cut; None takes what the model's positions leave.
    """

    tasks: Tasks | None = None
    style: Annotated[str, OneOf(*STYLES)] = "completion"
    max_length: Positive | None = None
    name: str = "infinitebench"

    cut = True

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        return known_tasks(self.tasks or TASKS, assets()["max_new_tokens"], "InfiniteBench")

    def read(self, task: str) -> Iterator[source.Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(read(task, self.path), _schema(task))

    def build(
        self, task: str, line: InfiniteBenchLine, tokenizer: Tokenizer | None = None, max_length: int | None = None
    ) -> Row:
        """Build a row of one line."""
        return build_row(task, line, tokenizer, max_length, self.style)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_length": self.max_length, "style": self.style, **super().identity()}


@cache
def assets() -> dict[str, dict[str, Any]]:
    """Return by task the prompts of "completion" and of "chat", and the reply lengths in "max_new_tokens"."""
    return json.loads(
        files("leank.eval.benchmarks").joinpath("assets", "infinitebench.json").read_text(encoding="utf-8")
    )


def build_row(
    task: str,
    data: InfiniteBenchLine,
    tokenizer: Tokenizer | None = None,
    max_length: int | None = None,
    style: str = "completion",
) -> Row:
    """One published line ("context", "input", "answer", "options", "id") as a `Row` with the official prompt.

    max_length: tokens of the prompt, cut in the middle; None leaves it whole. Raises ValueError for an unknown task or
    style and for a line that does not fit its task.
    """
    if style not in STYLES:
        raise ValueError(f"style={style!r} is unknown; choose one of {', '.join(STYLES)}")
    if task not in assets()[style]:
        raise ValueError(f"task={task!r} is not in InfiniteBench; choose one of {', '.join(assets()[style])}")
    context, question = fill(assets()[style][task], data["context"], _fields(task, data), tokenizer, max_length)
    return Row(
        task=task,
        id=str(data.get("id", "")),
        context=context,
        question=question,
        answers=label(task, data),
        max_new_tokens=assets()["max_new_tokens"][task],
        metric="infinitebench",
        chat=style == "chat",
    )


def read(task: str, path: str | Path | None = None) -> Iterator[source.Line]:
    """The published lines of a task; see `source.read`."""
    return source.read(f"InfiniteBench {task}", task, path, source.Hub(REPO, f"{task}.jsonl"))


def label(task: str, data: InfiniteBenchLine) -> list[object]:
    """What the task's scorer compares with: the answers, and of multiple choice the right option and its letter."""
    answer = data["answer"]
    answers = list(answer) if isinstance(answer, list) else [answer]
    if task not in CHOICES or (len(answers) == 2 and answers[1] in tuple(LETTERS)):
        return answers
    if answers[0] not in data["options"]:
        raise ValueError(f"{task}: the answer {answers[0]!r} is none of the options {data['options']!r}")
    return [answers[0], LETTERS[data["options"].index(answers[0])]]


def _fields(task: str, data: InfiniteBenchLine) -> dict[str, object]:
    """What a prompt's braces stand for, beside the context."""
    asked = data["input"]
    fields: dict[str, object] = {"input": asked, "question": asked}
    if task in CHOICES:
        fields |= {f"OPTION_{letter}": data["options"][i] for i, letter in enumerate(LETTERS)}
    if task == "math_find":
        fields["prefix"] = f"What is {_found('(The .+) of', asked).lower()} in the following list?"
    if task == "code_run":
        call = _found(r"(func_[0-9]+\(-?[0-9]+\))", asked)
        fields |= {"func_call": call, "func": call.split("(")[0]}
    return fields


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the input {text[:200]!r} does not say what is asked ({pattern})")
    return match[1]


def _schema(task: str) -> Schema:
    """Return the schema of a task. Labels of code_run, math_find and math_calc are numbers, of all others texts."""
    choice = task in CHOICES
    asked = any(field in assets()["completion"][task] for field in ("{input}", "{question}", "{func}"))
    fields = {
        "context": TEXT,
        "input": TEXT if asked else ANY_TEXT,
        "answer": _LABELS.get(task, Rule("a text that is not blank, or a list of such texts", is_text_or_texts)),
        "id": optional(NAME),
    }
    if choice:
        fields["options"] = FOUR_TEXTS
    return Schema(fields, _right_option if choice else lambda data: None, ("id",))


def _right_option(data: Mapping[str, Any]) -> str | None:
    """Say what is wrong with multiple choice: the answer, and its letter if given, must be of the options."""
    answer, options = data["answer"], data["options"]
    answers = [answer] if isinstance(answer, str) else answer
    found = [letter for letter, option in zip(LETTERS, options, strict=True) if option == answers[0]]
    if not found:
        return f'"answer" is {reprlib.repr(answers[0])}, which is none of the options {reprlib.repr(options)}'
    if len(answers) == 2 and answers[1] in found:
        return None
    if len(answers) > 1:
        return f'"answer" is {reprlib.repr(answer)}; it must be the right option, or that with its letter'
    return None if len(found) == 1 else f'"options" holds the answer {reprlib.repr(answers[0])} more than once'


def _values(value: object) -> bool:
    inner = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    return isinstance(inner, list) and bool(inner) and all(map(is_whole, inner))


_LABELS = {
    **dict.fromkeys(("passkey", "number_string"), Rule("the digits as a text", alone(is_digits))),
    "code_run": Rule("a whole number", alone(is_whole)),
    "math_find": Rule("a number", alone(is_number)),
    "math_calc": Rule("a list of whole numbers", _values),
}


@metric("infinitebench")
def score(row: Row, reply: str) -> float:
    """The official score of the row's task, 0-1."""
    return infinitebench.score(row.task, reply, row.answers)
