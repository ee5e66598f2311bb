"""LongGenBench (Liu et al. 2024, arXiv 2410.04199): many GSM8K questions in one prompt, all answered in one long reply.

Behaviour of Dominic789654/LongGenBench 9845864, longgenbench_GSM8K_openai.py, written anew: that code has no licence,
and so neither its instruction nor its examples are here. Data: GSM8K's test.jsonl (MIT), or problems that are generated
(`eval.benchmarks.gsm_infinite`'s medium ones without filler).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from annotated_types import Ge, MinLen
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.gsm.infinite import nth
from leank.data_gen.reading import NotBlank, digest, read_text
from leank.eval.benchmarks.base import Row, benchmark, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, checked, read
from leank.typed import Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = (
    "Answer all questions below, one after the other and step by step, in the form of the examples. Begin each answer "
    "with 'Answer_' and its number, and end it with 'The answer is' and the number. Do not repeat a question."
)
EXAMPLES = """Question_1:
A baker has 12 loaves. She sells 5 in the morning and bakes 8 more at noon. How many loaves has she then?
Question_2:
A train has 6 carriages with 20 seats each, and 45 seats are taken. How many are free?

Answer_1:
She has 12 loaves and sells 5, so 12 - 5 = 7 are left. She bakes 8 more: 7 + 8 = 15. The answer is 15.

Answer_2:
The train has 6 * 20 = 120 seats. Of these 120 - 45 = 75 are free. The answer is 75.
"""
NUMBER = re.compile(r"\d*\.?\d+")
ANSWERS = re.compile(r"(?<=:\n)(.*?)(?=\n\n|$)", re.DOTALL)


class Gsm8kLine(TypedDict):
    """A problem; the answer's last number is the result, behind "####" in GSM8K."""

    question: NotBlank
    answer: NotBlank
    id: NotRequired[str | int | None]


@benchmark("longgenbench")
@dataclass
class LongGenBench(FromFiles):
    """LongGenBench on GSM8K; a sample is a prompt of `questions` problems.

    path: GSM8K's test.jsonl (.gz) or its folder; None generates the problems
    """

    questions: Positive = 30  # of a prompt; the last one of a file may have fewer
    samples: Samples | None = 8  # prompts, from the first on; None takes all of a file
    ops: Annotated[Sequence[Annotated[int, Ge(2)]], MinLen(1)] = (2, 3, 4)  # of generated problems, in turn
    examples: str | None = None  # file of the official examples; None takes two of this project's
    max_new_tokens: Positive = 8192  # of a reply
    name: str = "longgenbench"
    seed: Seed = 42  # of the generator

    schema = TypeAdapter(Gsm8kLine)
    same = ("question",)
    counted = ("questions", "max_new_tokens")

    def prepare(self, tokenizer: "PreTrainedTokenizerBase", limit: int | None, max_new_tokens: int | None) -> None:
        if self.path is None:
            if self.samples is None:
                raise ValueError("benchmark.samples=null means all of a file; without benchmark.path, give a number")
            ops = self.ops
            # even numbers, whose values can all be computed in turn
            made = [nth(2, 0, ops[i % len(ops)], 2 * i, self.seed) for i in range(self.samples * self.questions)]
            problems = [{"question": f"{p.problem} {p.question}", "answer": f"#### {p.answer}"} for p in made]
        else:
            lines = list(checked(self.lines(self.name), self.schema, self.same))
            for line in lines:
                self.try_line(line, self.name)
            self._digests[self.name] = self._known_by(self.name, lines)
            problems = [line.data for line in lines]
            if not problems:
                raise ValueError(f"benchmark.path={self.path} has no lines")
        starts = range(0, len(problems), self.questions)[: self.samples]
        groups = {str(number): problems[start : start + self.questions] for number, start in enumerate(starts)}
        self._lines[self.name] = dict(groups)  # a sample has several lines

    def lines(self, task: str) -> Iterator[Line]:
        return read("GSM8K", "test", self.path, Hub("no data set", "test.jsonl"))

    def data(self, task: str) -> str | None:
        return None if self.path is None else super().data(task)

    def identity(self) -> dict[str, object]:
        made = {"ops": list(self.ops)} if self.path is None else {}
        return super().identity() | made | {"examples": digest(self._examples)}

    @property
    def _examples(self) -> str:
        if self.examples is None:
            return EXAMPLES
        if not Path(self.examples).is_file():
            raise FileNotFoundError(f"benchmark.examples={self.examples} does not exist; give a text, or leave it out")
        return read_text(Path(self.examples))

    def build(self, task: str, data: Any) -> Row:
        """A prompt of the problems in `data`, or of one; the first number is that behind the examples' last one."""
        problems: list[Gsm8kLine] = data if isinstance(data, list) else [data]
        first = 1 + self._examples.count("Question_")
        asked = [f"Question_{n}:\n{problem['question']}\n" for n, problem in enumerate(problems, first)]
        return Row(
            task=self.name,
            id="",
            context=f"Examples:\n{self._examples}\n\nQuestions:\n" + "".join(asked[:-1]),
            question=asked[-1],
            answers=[result(problem["answer"]) for problem in problems],
            max_new_tokens=self.max_new_tokens,
            metric="longgenbench",
            preamble=({"role": "system", "content": INSTRUCTION},),
            meta={"questions": len(problems)},
        )

    def right(self, row: Row) -> Sequence[str]:
        """None: officially no reply to a result that is written with a comma is right."""
        return ["\n\n".join(f"Answer_{n}:\nThe answer is {answer}." for n, answer in enumerate(row.answers, 1))]

    def tried(self) -> Any:
        """The longest prompt."""
        (cell,), groups = self.cells(), self._lines[self.name]
        return [(cell, max(cell.samples, key=lambda sample: len(self.build(cell.task, groups[sample]).prompt)))]


def result(answer: str) -> str:
    """The last number of a reference answer, as it is written. Raises ValueError without one."""
    found = NUMBER.findall(answer)
    if not found:
        raise ValueError(f"answer={answer[-40:]!r} has no number")
    return str(found[-1])


def stated(reply: str) -> list[str]:
    """The answers of a reply in order: "Answer_" is taken out, and what follows a ":" at a line's end is one.

    An answer ends at an empty line. So ":" at the end of a line within an answer begins another one, as officially.
    """
    return [text.strip() for text in ANSWERS.findall("\n".join(reply.split("Answer_")))]


@metric("longgenbench")
def score(row: Row, reply: str) -> float:
    """The share of the questions whose answer, in their order, ends in the right number, 0-1."""
    found = [NUMBER.findall(text.replace(",", "")) for text in stated(reply)]
    right = sum(bool(some) and some[-1] == truth for some, truth in zip(found, row.answers, strict=False))
    return right / len(row.answers)
