"""LongBench v1: prompts, truncation and rows.

Source: THUDM/LongBench 2e00731, pred.py and config/ (MIT; prompts unchanged in assets/, typo "asconcisely" included).
Data: <task>.jsonl files (or .jsonl.gz) in a folder, else the benchmark's data.zip from the Hugging Face hub.
"""

from __future__ import annotations

import json
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
from leank.eval.benchmarks.prompting import Tokenizer, fill
from leank.eval.benchmarks.row import Row
from leank.eval.benchmarks.rules import ANY_TEXT, NAME, TEXT, TEXTS, WHOLE, Rule, Schema, checked, optional
from leank.eval.benchmarks.scoring import metric
from leank.eval.metrics import longbench
from leank.typed import OneOf, Positive

HUB = source.Hub("zai-org/LongBench", "data.zip")  # THUDM/LongBench until it moved; its loading script is refused

# Chat models do better without their template on few-shot and code tasks (official choice).
NO_CHAT_TASKS = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
ENGLISH_TASKS = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
# LongBench-E draws 13 of them anew, evenly over context lengths.
E_TASKS = tuple(task for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique", "qmsum"))
PRESETS: dict[str, tuple[str, ...]] = {
    "english": ENGLISH_TASKS,
    "think": ENGLISH_TASKS,
    "iap": ENGLISH_TASKS,
    "leank": tuple(task for task in ENGLISH_TASKS if task not in ("narrativeqa", "musique")),
    "longbench_e": tuple(f"{task}_e" for task in E_TASKS),
}


@cache
def prompts() -> dict[str, str]:
    """Official prompt of each task, with {context} and most also {input}."""
    return _asset("longbench_dataset2prompt.json")


@cache
def max_new_tokens() -> dict[str, int]:
    """Official reply length of each task, tokens."""
    return _asset("longbench_dataset2maxlen.json")


def tasks(preset: str) -> tuple[str, ...]:
    """Task names of a preset. Raises ValueError for an unknown one."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[preset]


class LongBenchLine(TypedDict):
    """A line of the data set."""

    context: str
    input: str
    answers: list[str]
    all_classes: NotRequired[list[str] | None]
    length: NotRequired[int | None]
    _id: NotRequired[str | int | None]


@benchmark("longbench")
@dataclass
class LongBench(FromFiles[LongBenchLine]):
    """LongBench v1.

    path: .jsonl, .jsonl.gz, data.zip or a folder of them.
    tasks: official names; None takes those of `preset`.
    preset: tasks of a paper's table.
    max_length: tokens above which a prompt is cut; None takes what the model's positions leave.
    """

    tasks: Tasks | None = None
    preset: Annotated[str, OneOf(*PRESETS)] = "leank"
    max_length: Positive | None = None
    name: str = "longbench"

    cut = True

    def wanted(self) -> Sequence[str]:
        """Return the names of the tasks. Raises ValueError for an unknown one."""
        known = max_new_tokens()
        return known_tasks(self.tasks or tasks(self.preset), known, "LongBench", lambda t: t.removesuffix("_e"))

    def read(self, task: str) -> Iterator[source.Line]:
        """Yield the task's lines, checked against their schema."""
        return checked(read(task, self.path), _schema(task))

    def build(
        self, task: str, line: LongBenchLine, tokenizer: Tokenizer | None = None, max_length: int | None = None
    ) -> Row:
        """Build a row of one line."""
        return build_row(task, line, tokenizer, max_length)

    def identity(self) -> dict[str, object]:
        """Return what every sample depends on; see `Benchmark.identity`."""
        return {"max_length": self.max_length, **super().identity()}


def build_row(
    task: str,
    data: LongBenchLine,
    tokenizer: Tokenizer | None = None,
    max_length: int | None = None,
) -> Row:
    """One line of the data set as a `Row`; ``row.prompt`` is the official prompt.

    task: official name; "_e" (LongBench-E) uses the same prompt. data: "context", "input", "answers", and "length",
    "all_classes", "_id" where they exist. max_length: truncate the prompt to so many tokens, before the chat template
    as officially; None leaves it whole. Where truncation cuts into the question, all of the prompt is context.

    Raises ValueError for an unknown task.
    """
    name = task.removesuffix("_e")
    if name not in prompts():
        raise ValueError(f"task={task!r} is not in LongBench; choose one of {', '.join(prompts())}")
    context, question = fill(prompts()[name], data["context"], {"input": data["input"]}, tokenizer, max_length)
    return Row(
        task=task,
        id=str(data.get("_id", "")),
        context=context,
        question=question,
        answers=list(data["answers"]),
        max_new_tokens=max_new_tokens()[name],
        metric="longbench",
        # samsum: the official run also stops at the token for a newline, and allows neither end as the first token
        ends=("\n",) if name == "samsum" else (),
        min_new_tokens=1 if name == "samsum" else 0,
        chat=name not in NO_CHAT_TASKS,
        all_classes=data.get("all_classes"),
        length=data.get("length"),
    )


def read(task: str, path: str | Path | None = None) -> Iterator[source.Line]:
    """The data set's own lines; see `source.read`. path: also LongBench's data.zip."""
    return source.read(f"LongBench {task}", task, path, HUB)


def _asset(name: str) -> Any:
    return json.loads(files("leank.eval.benchmarks").joinpath("assets", name).read_text(encoding="utf-8"))


def _schema(task: str) -> Schema:
    """Return the schema of a task, "_e" or not."""
    name = task.removesuffix("_e")
    classes = name in ("trec", "lsht")

    def whole(data: Mapping[str, Any]) -> str | None:
        if data.get("dataset") is not None and data["dataset"].removesuffix("_e") != name:
            return f'"dataset" is {data["dataset"]!r}, which is not the task {task!r}'
        if classes and not set(data["answers"]) & set(data["all_classes"]):
            return f'"answers" is {reprlib.repr(data["answers"])}; one must be among "all_classes"'
        return None

    fields = {
        "context": TEXT,
        "input": TEXT if "{input}" in prompts()[name] else ANY_TEXT,
        "answers": TEXTS,
        "all_classes": Rule(TEXTS.must, TEXTS.holds, needed=classes),
        "length": optional(WHOLE),
        "dataset": optional(TEXT),
        "_id": optional(NAME),
    }
    return Schema(fields, whole, ("_id",))


@metric("longbench")
def score(row: Row, reply: str) -> float:
    """The official score of the row's task, 0-1."""
    return longbench.score(row.task, reply, row.answers, row.all_classes)
