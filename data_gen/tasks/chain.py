"""Chains through a table: a long reply whose every step looks up the next entry, and whose end can be checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from leank.data_gen import haystack
from leank.data_gen.request import Draft, Request
from leank.data_gen.sample import Question
from leank.data_gen.task import Task

HEADER = "The following table says where each path leads. Memorize it. I will send you along a path afterwards.\n"
LINE = "{a} leads to {b}."
LAST = "{a} is the end."
QUESTION = "\nQuestion: Which entries of the table take you from {start} to the end of its path?"
PREFIX = " Answer: The path runs as follows.\n"


@dataclass(frozen=True)
class Chain(Task):
    """A table of paths whose lines are shuffled; a question asks for one path from its start to its end, line by line.

    The reply is right if its end is: every line of the reply tells which line of the table is needed next.

    steps: lines of the path up to its end, at least 1. Other paths, up to twice as long, fill the table.
    max_new_tokens: room for the reply.

    Raises ValueError for a number of steps below 1.
    """

    steps: int = 64
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`."""
        rng = request.rng()
        lines, others, asked = self._contents(request, rng)
        counter = request.counter
        fixed = counter.count(HEADER) + request.tail(asked) + sum(counter.pieces(lines, "\n", remember=False))
        budget = request.left(fixed, "path, question and answer", f"questions={request.questions}, steps")
        units, tokens = haystack.take_lines(budget, counter, lambda: next(others))
        return Draft(self._table(lines, units, rng), asked, fixed + tokens)

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; a unit is a line of another path."""
        rng = request.rng()
        lines, others, asked = self._contents(request, rng)
        return Draft(self._table(lines, list(islice(others, units)), rng), asked)

    def step(self, request: Request) -> int:
        """Return ten lines; RULER has no such task."""
        return 10

    def _contents(self, request: Request, rng: random.Random) -> tuple[list[str], Iterator[str], tuple[Question, ...]]:
        """Return the lines of the paths in question, those of other paths without end, and the questions."""
        names = _names(rng)
        paths = [list(islice(names, self.steps)) for _ in range(request.questions)]
        asked = tuple(_ask(path) for path in paths)
        return [line for path in paths for line in _lines(path)], self._others(names, rng), asked

    def _others(self, names: Iterator[str], rng: random.Random) -> Iterator[str]:
        while True:
            yield from _lines(list(islice(names, rng.randint(1, 2 * self.steps))))

    @staticmethod
    def _table(lines: list[str], others: list[str], rng: random.Random) -> str:
        table = [*lines, *others]
        rng.shuffle(table)
        return HEADER + "\n".join(table)


def _names(rng: random.Random) -> Iterator[str]:
    """Yield distinct names without end: the nouns in a random order, then with numbers behind them."""
    nouns = list(haystack.words("nouns"))
    rng.shuffle(nouns)
    yield from nouns
    number = 2
    while True:
        yield from (f"{noun}{number}" for noun in nouns)
        number += 1


def _lines(path: list[str]) -> list[str]:
    return [*(LINE.format(a=a, b=b) for a, b in pairwise(path)), LAST.format(a=path[-1])]


def _ask(path: list[str]) -> Question:
    lines = _lines(path)
    return Question(QUESTION.format(start=path[0]), PREFIX, (lines[-1],), "\n".join(lines))
