"""MRCR: a long chat in which the same thing was asked for several times; one of those replies is to be repeated.

Source: the card of openai/mrcr on the hub (MIT), which has the grader. Data: its parquet files, or .jsonl of their
rows.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from leank.data_gen.reading import UNREADABLE, NotBlank
from leank.eval.benchmarks.base import Row, benchmark, kept, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, checked, read
from leank.extras import require
from leank.typed import Positive

TASKS = ("2needle", "4needle", "8needle")
MAX_NEW_TOKENS = 2048


class Turn(TypedDict):
    """A message of the chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class MrcrLine(TypedDict):
    """A row of the data set; prompt is the chat, a list of messages as JSON, whose last one is the question."""

    prompt: NotBlank
    answer: NotBlank
    random_string_to_prepend: NotBlank
    n_needles: NotRequired[int | None]
    total_messages: NotRequired[int | None]
    n_chars: NotRequired[int | None]


CHAT = TypeAdapter(Annotated[list[Turn], MinLen(1)])


@benchmark("mrcr")
@dataclass
class Mrcr(FromFiles):
    """MRCR; path: the folder of 2needle.parquet and so on, or of 2needle.jsonl (.gz), or the file of one task."""

    tasks: Tasks = TASKS
    most_chars: Positive | None = None  # rows whose prompt has more characters are left out; None takes all
    max_new_tokens: Positive = MAX_NEW_TOKENS  # of a reply
    name: str = "mrcr"

    schema = TypeAdapter(MrcrLine)
    counted = ("max_new_tokens",)

    def wanted(self) -> Sequence[str]:
        return known_tasks(self.tasks, TASKS, "is no task of MRCR")

    def lines(self, task: str) -> Iterator[Line]:
        if self.path is None:
            raise FileNotFoundError(
                f"MRCR: no path= given; download {task}*.parquet of https://huggingface.co/datasets/openai/mrcr and "
                "pass path=<their folder>"
            )
        path = Path(self.path)
        tables = sorted(path.glob(f"{task}*.parquet")) if path.is_dir() else [path] if path.suffix == ".parquet" else []
        found = (
            (line for table in tables for line in _from_parquet(table))
            if tables
            else read(f"MRCR {task}", task, path, Hub("openai/mrcr", f"{task}.parquet"))
        )
        for line in checked(found, self.schema):
            if self.most_chars is None or len(line.data["prompt"]) <= self.most_chars:
                yield line

    def build(self, task: str, data: MrcrLine) -> Row:
        try:
            chat = CHAT.validate_python(json.loads(data["prompt"]), strict=True)
        except (ValueError, RecursionError) as error:
            what = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise ValueError(f"its prompt is no chat: {what}") from None
        if chat[-1]["role"] != "user":
            raise ValueError(f"the last message of its chat is the {chat[-1]['role']}'s, not the user's")
        return Row(
            task=task,
            id="",
            context="",
            question=chat[-1]["content"],
            answers=[data["answer"], data["random_string_to_prepend"]],
            max_new_tokens=self.max_new_tokens,
            metric="mrcr",
            preamble=tuple({"role": str(turn["role"]), "content": turn["content"]} for turn in chat[:-1]),
            meta=kept(data, "n_needles", "total_messages", "n_chars"),
        )

    def right(self, row: Row) -> Sequence[str]:
        return [row.answers[0]]


def _from_parquet(file: Path) -> Iterator[Line]:
    require("MRCR", "eval", "pyarrow")
    import pandas as pd

    try:
        rows = pd.read_parquet(file).to_dict("records")
    except (*UNREADABLE, ImportError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ValueError(f"{file} cannot be read: {error}; copy it again, or give {file.stem}.jsonl") from None
    for number, row in enumerate(rows, 1):
        yield Line(str(file), number, {str(name): None if value != value else value for name, value in row.items()})


@metric("mrcr")
def score(row: Row, reply: str) -> float:
    """The similarity of reply and answer, 0-1: difflib's ratio behind the string that both begin with, else 0."""
    answer, mark = row.answers
    if not reply.startswith(mark):
        return 0.0
    return SequenceMatcher(None, reply.removeprefix(mark), str(answer).removeprefix(mark)).ratio()
