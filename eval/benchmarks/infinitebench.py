"""InfiniteBench: prompts, truncation and rows of its twelve tasks; ASL reports ten.

Source: OpenBMB/InfiniteBench 88b3daa, src/prompt.py and src/eval_utils.py (MIT; prompts unchanged in assets/). ASL uses
the copy in MInference, which gives every open model the prompts made for YaRN-Mistral, without a chat template, and
reads the published files: that is the style "completion"; "chat" are the prompts made for GPT-4.
Data: <task>.jsonl files in a folder, else from the Hugging Face hub.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from eval.benchmarks import source
from eval.benchmarks.mmlu import LETTERS
from eval.benchmarks.prompting import Tokenizer, fill
from eval.benchmarks.row import Row

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


@cache
def assets() -> dict[str, dict[str, Any]]:
    """Return by task the prompts of "completion" and of "chat", and the reply lengths in "max_new_tokens"."""
    return json.loads(files("eval.benchmarks").joinpath("assets", "infinitebench.json").read_text(encoding="utf-8"))


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
