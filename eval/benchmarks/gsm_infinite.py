"""GSM-Infinite, cell by cell (eval.benchmarks.base): problems from our generator or a file, prompts, rows and grades.

Behaviour of Infini-AI-Lab/gsm_infinite caa5388 (prompts, pred/eval_realistic.py, pred/eval_symbolic.py), written anew.
Scores depend on the wording of the prompts. Their three headers say the same of other nouns, so one template fills
them; spelling and grammar are the benchmark's. The grader of realistic problems tries ten (keyword, terminator) rules
in order and takes the first whose text is an integer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NotRequired

import numpy as np
from annotated_types import Ge, MinLen
from pydantic import Discriminator, StringConstraints, Tag, TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.gsm.infinite import MODES, TEMPLATES, Problem, nth
from leank.data_gen.gsm.symbolic import SymbolicProblem, symbolic
from leank.data_gen.reading import NotBlank
from leank.data_gen.tokens import counter_of
from leank.eval.benchmarks.base import Cell, Row, benchmark, kept, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, asset, checked, read
from leank.typed import Count, OneOf, Positive, Samples, Seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUBSETS = {"medium": 2, "hard": 3, "symbolic": 0}  # and their d
MAX_NEW_TOKENS = 4096
SYSTEM = "You are a helpful assistant"
REVERSE_HINT = " The following questions might be easier to solve by equations."

OFFICIAL = asset("gsm_infinite")  # the header of a problem, and by template the nouns in it


class _Line(TypedDict):
    """What both kinds of problem have."""

    problem: NotBlank
    question: NotBlank
    op: Annotated[int, Ge(1)]
    length: NotRequired[str | int | None]
    id: NotRequired[str | int | None]


class RealisticLine(_Line):
    """A Medium or Hard problem: its answer, a solution that ends in "Answer: N.", or both alike."""

    template: Annotated[str, OneOf(*TEMPLATES)]
    mode: Annotated[str, OneOf(*MODES)]
    answer: NotRequired[int | Annotated[str, StringConstraints(pattern="^-?[0-9]{1,18}$")] | None]
    solution: NotRequired[NotBlank | None]
    d: NotRequired[Annotated[int, Ge(1)] | None]


class SymbolicLine(_Line):
    """A symbolic problem: the variables, such as V12, that the reply has to name."""

    answer_list: Annotated[list[Annotated[str, StringConstraints(pattern="^V[0-9]+$")]], MinLen(1)]


def _kind(data: object) -> str:
    return "symbolic" if isinstance(data, dict) and "answer_list" in data else "realistic"


@benchmark("gsm_infinite")
@dataclass
class GsmInfinite(FromFiles):
    """GSM-Infinite; a cell is a subset at a nominal length.

    path: .jsonl or .jsonl.gz of problems, see `RealisticLine`, `SymbolicLine`; None generates them.
    """

    # "medium", "hard" or "symbolic", of the generator; a file has its own
    subsets: Annotated[Sequence[Annotated[str, OneOf(*SUBSETS)]], MinLen(1)] = ("medium", "hard")
    # nominal tokens, of the generator; 0 is without filler
    lengths: Annotated[Sequence[Count], MinLen(1)] = (8000, 16_000, 32_000)
    # problems of other ops are left out; None takes all of a file
    ops: Annotated[Sequence[Annotated[int, Ge(2)]], MinLen(1)] | None = (2, 4, 6, 8, 10, 12)
    samples: Samples | None = 256  # the first so many of each subset, length and op; None takes all of a file
    merge_turns: bool = False  # whether a problem is one user turn, for templates that refuse two in a row
    max_new_tokens: Positive = MAX_NEW_TOKENS  # of a reply
    name: str = "gsm_infinite"
    seed: Seed = 42  # of the generator

    schema = TypeAdapter(
        Annotated[
            Annotated[SymbolicLine, Tag("symbolic")] | Annotated[RealisticLine, Tag("realistic")], Discriminator(_kind)
        ]
    )
    same = ("id", "problem", "question")
    counted = ("merge_turns", "max_new_tokens")

    def prepare(self, tokenizer: PreTrainedTokenizerBase, limit: int | None, max_new_tokens: int | None) -> None:
        if self.path is None:
            self._plan()
            return
        counts: Counter[tuple[str, int]] = Counter()
        for line in checked(self.lines(self.name), self.schema, self.same):
            row, op = self.try_line(line, self.name), line.data["op"]
            subset = {2: "medium", 3: "hard"}.get(row.meta.get("d", 0), "realistic")
            subset = "symbolic" if row.metric == "gsm_symbolic" else subset
            task = f"{subset} {row.meta.get('length', '')}".strip()
            counts[task, op] += 1
            if (self.ops is None or op in self.ops) and (self.samples is None or counts[task, op] <= self.samples):
                self._lines.setdefault(task, {})[str(line.number)] = line.data
        if not self._lines:
            raise ValueError(f"benchmark.path={self.path} has no problem with op in {self.ops}")

    def _plan(self) -> None:
        if self.ops is None or self.samples is None:
            raise ValueError(
                f"benchmark.ops={self.ops}, benchmark.samples={self.samples}: null means all of a file; without "
                "benchmark.path, give both"
            )
        names = [_nominal(length) for length in self.lengths]
        if len({*names}) < len({*self.lengths}):
            raise ValueError(
                f"benchmark.lengths={list(self.lengths)}: two of them are called alike in tables; drop one"
            )
        for subset in self.subsets:
            for length, name in zip(self.lengths, names, strict=True):
                self._lines[f"{subset} {name}"] = {
                    f"{op}-{index}": (subset, length, op, index) for op in self.ops for index in range(self.samples)
                }

    def tried(self) -> Iterable[tuple[Cell, str]]:
        """The longest problem of a file's cells; of a generated one the last problem."""
        return super().tried() if self.path is not None else [(cell, cell.samples[-1]) for cell in self.cells()]

    def lines(self, task: str) -> Iterator[Line]:
        return read("GSM-Infinite", task, self.path, Hub("no data set", f"{task}.jsonl"))

    def data(self, task: str) -> None:
        """A file counts in `identity`, the generator has none."""

    def row(self, cell: Cell, sample: str, tokenizer: PreTrainedTokenizerBase, overhead: int) -> Row:
        data = self._lines[cell.task][sample]
        if self.path is None:
            data = self._generate(data, tokenizer)
        return replace(self.build(cell.task, data), id=sample, max_new_tokens=self.max_new_tokens)

    def build(self, task: str, data: Any) -> Row:
        return symbolic_row(data) if _kind(data) == "symbolic" else realistic_row(data, self.merge_turns)

    def right(self, row: Row) -> Sequence[str]:
        return [f"Answer: {row.answers[0]}." if row.metric == "gsm_infinite" else ", ".join(row.answers)]

    def _generate(self, planned: tuple[str, int, int, int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        subset, length, op, index = planned
        if subset == "symbolic":
            made: Problem | SymbolicProblem = symbolic(op, self.seed, index, length)
        else:
            made = nth(SUBSETS[subset], length, op, index, self.seed, counter_of(tokenizer))
        return {**asdict(made), "length": _nominal(length)}


def _nominal(length: int) -> str:
    """A length as tables call it: "zero", "8k" (8000 and 8192, as anyone says), else its tokens: "8500"."""
    if length == 0:
        return "zero"
    return f"{length // 1000}k" if length % 1000 == 0 or length % 1024 == 0 else str(length)


def realistic_row(data: Mapping[str, Any], merge_turns: bool = False) -> Row:
    """A Medium or Hard problem (`RealisticLine`): system message, header, problem, the last two being user turns.

    merge_turns: put header and problem into one user turn, for chat templates that want turns to alternate.
    """
    instructions = OFFICIAL["header"].format(**OFFICIAL["nouns"][data["template"]])
    instructions += REVERSE_HINT if data["mode"] == "forwardreverse" else ""
    context, system = f"Problem: {data['problem']} ", {"role": "system", "content": SYSTEM}
    return Row(
        task="gsm_infinite",
        id=str(data.get("id", "")),
        context=f"{instructions} {context}" if merge_turns else context,
        question=f"Question: {data['question']} Solution: ",
        answers=[gold_answer(data.get("answer"), data.get("solution"))],
        max_new_tokens=MAX_NEW_TOKENS,
        metric="gsm_infinite",
        preamble=(system,) if merge_turns else (system, {"role": "user", "content": instructions}),
        meta=kept(data, "op", "template", "mode", "length", "d"),
    )


def gold_answer(answer: int | str | None, solution: str | None) -> int:
    """The answer as given, or "Answer: N." of the solution. Raises ValueError if there is none, or two differ."""
    stated, dot, _ = (solution or "").partition("Answer: ")[2].partition(".")
    try:
        found = {int(text) for text in (answer, stated if dot else None) if text is not None}
    except ValueError:
        found = {int(answer)} if answer is not None else set()
    if len(found) != 1:
        raise ValueError(f"answer={answer!r} and solution=...{(solution or '')[-80:]!r} must state one answer")
    return found.pop()


def symbolic_row(data: Mapping[str, Any]) -> Row:
    """One symbolic problem as a `Row`. data: see `SymbolicLine`."""
    return Row(
        task="gsm_infinite_symbolic",
        id=str(data.get("id", "")),
        context=f"<context>\n{data['problem']}\n</context>",
        question=f"\n\n{data['question']}",
        answers=list(data["answer_list"]),
        max_new_tokens=MAX_NEW_TOKENS,
        metric="gsm_symbolic",
        meta=kept(data, "op", "n", "length"),
    )


class AnswerRule(NamedTuple):
    """Text between `keyword` and `end` (or the end of the reply) is read as the answer."""

    keyword: str
    end: str | None  # None: the answer is the run of digits after the keyword
    last: bool = False  # take the last occurrence of the keyword, not the first


RULES = (
    AnswerRule("answer: ", "."),
    AnswerRule("solution: ", "."),
    AnswerRule("oxed{", "}", last=True),
    AnswerRule("**answer:** ", "."),
    AnswerRule("**answer: ", "**"),
    AnswerRule("final answer: answer: ", "."),
    AnswerRule("\nanswer: ", "."),
    AnswerRule("\\text{answer: } ", None),
    AnswerRule("is ", ".", last=True),
    AnswerRule("answer: ", "\n"),
)


@metric("gsm_symbolic")
def score_symbolic(row: Row, reply: str) -> float:
    """Whether the variables that the reply names behind the last "</think>" are the right ones, 0 or 1.

    Officially a 7B model first extracts the names from the reply; give its output here to repeat that.
    """
    return float({*re.findall(r"\bV\d+\b", reply.rsplit("</think>", 1)[-1])} == {*row.answers})


def stated_integer(reply: str) -> int | None:
    r"""The integer that a reply states, or None.

    The reply is lower-cased; the first rule that yields an integer decides, so of two "answer: " the first counts, of
    two "is " the last, and "Answer: 12 animals." states none. Integers are what int() takes: "+12", " 12 ", "１２",
    "1_2". The official digit rule (``\\text{Answer: } 12``) raises IndexError, which ends its whole run, when nothing
    follows the number; such a reply gets no credit here.
    """
    text = re.sub(".\x08", "b", reply).lower()
    for rule in RULES:
        start = text.rfind(rule.keyword) if rule.last else text.find(rule.keyword)
        if start == -1:
            continue
        start += len(rule.keyword)
        if rule.end is None:
            stop = start
            while stop < len(text) and text[stop].isdigit():
                stop += 1
            if stop == len(text):
                return None
        else:
            stop = text.find(rule.end, start)
        try:
            return int(text[start:stop] if stop != -1 else text[start:])
        except ValueError:
            continue
    return None


@metric("gsm_infinite", by_op=True, states=stated_integer)
def score(row: Row, reply: str) -> float:
    """Whether the reply to a realistic problem states its answer, 0 or 1."""
    return float(stated_integer(reply) == row.answers[0])


def auc(accuracy_by_op: Mapping[int, float]) -> float:
    """LeanK's area (tables 14 -> 4): trapezoid over {op: accuracy 0-1} at unit spacing; six values give 0-5, one 0."""
    return float(np.trapezoid([accuracy_by_op[op] for op in sorted(accuracy_by_op)]))
