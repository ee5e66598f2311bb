"""GPQA-Diamond: 198 questions of graduate level, each with four choices, answered in reasoning.

Source: openai/simple-evals 0ac027d, gpqa_eval.py and common.py (MIT; the prompt is unchanged). Data: the user's own
copy of gpqa_diamond.csv (Rein et al. 2023), whose authors ask that its questions are not published.
"""

import csv
import io
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank, read_text
from leank.eval.benchmarks.base import Row, benchmark, kept, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, checked, read
from leank.eval.benchmarks.math500 import MAX_NEW_TOKENS
from leank.typed import Positive, Seed

LETTERS = "ABCD"
PROMPT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
    "{}\n\nA) {}\nB) {}\nC) {}\nD) {}"
)
ANSWER = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
FILE = "gpqa_diamond"

GpqaLine = TypedDict(
    "GpqaLine",
    {
        "Question": NotBlank,
        "Correct Answer": NotBlank,
        "Incorrect Answer 1": NotBlank,
        "Incorrect Answer 2": NotBlank,
        "Incorrect Answer 3": NotBlank,
    },
)


@benchmark("gpqa")
@dataclass
class Gpqa(FromFiles):
    """GPQA-Diamond; path: gpqa_diamond.csv, a .jsonl of its columns (.gz too), or the folder of one of them."""

    max_new_tokens: Positive = MAX_NEW_TOKENS  # of a reply
    name: str = "gpqa"
    seed: Seed = 0  # of the order of choices; 0 gives that of the first of the official four repeats

    schema = TypeAdapter(GpqaLine)
    same = ("Question",)
    counted = ("max_new_tokens",)

    def lines(self, task: str) -> Iterator[Line]:
        """Yield the questions, each with the order of its choices, which depends on its place in the file."""
        if self.path is None:
            raise FileNotFoundError(
                f"GPQA: no path= given, and its questions are not fetched from the hub; pass path=<{FILE}.csv>, of the "
                "authors' dataset.zip"
            )
        table = Path(self.path) / f"{FILE}.csv" if Path(self.path).is_dir() else Path(self.path)
        csv_there = table.suffix == ".csv" and table.is_file()
        found = _from_csv(table) if csv_there else read("GPQA", FILE, self.path, Hub("no data set", f"{FILE}.csv"))
        order = random.Random(self.seed)
        for line in checked(found, self.schema):
            yield replace(line, data={**line.data, "order": order.sample(range(4), 4)})

    def build(self, task: str, data: GpqaLine) -> Row:
        texts: Sequence[str] = [data[name] for name in CHOICES]  # type: ignore[literal-required]
        choices = [texts[place] for place in data["order"]]  # type: ignore[typeddict-item]
        question = PROMPT.format(data["Question"], *choices)
        return Row(
            task="gpqa_diamond",
            id="",
            context=question[: question.index("\n\nA) ")],
            question=question[question.index("\n\nA) ") :],
            answers=[LETTERS[choices.index(texts[0])]],
            max_new_tokens=self.max_new_tokens,
            metric="gpqa",
            meta=kept(data, "Subdomain"),
        )

    def right(self, row: Row) -> Sequence[str]:
        return [f"Answer: {row.answers[0]}"]


def _from_csv(file: Path) -> Iterator[Line]:
    """The lines of the official file as objects. Raises ValueError without its columns."""
    table = csv.DictReader(io.StringIO(read_text(file), newline=""))
    lacking = [name for name in ("Question", *CHOICES) if name not in (table.fieldnames or ())]
    if lacking:
        raise ValueError(f"{file} has no column {', '.join(lacking)}; give the authors' own {FILE}.csv")
    for row in table:
        yield Line(str(file), table.line_num, {name: text for name, text in row.items() if name and text is not None})


def stated(reply: str) -> str | None:
    """The letter after the first "Answer:" of a reply, as it is written; None without any."""
    found = ANSWER.search(reply)
    return None if found is None else found[1]


@metric("gpqa", states=stated)
def score(row: Row, reply: str) -> float:
    """Whether the letter that the reply states is the right one, 0 or 1; a small letter is wrong, as officially."""
    return float(stated(reply) == row.answers[0])
