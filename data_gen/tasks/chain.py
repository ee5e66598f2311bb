"""Chains through a table: a long reply whose every step looks up the next entry, and whose end can be checked."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise

from leank.data_gen import haystack
from leank.data_gen.task import Filler, LaidOut, Layout, Question, Request
from leank.typed import Positive

HEADER = "The following table says where each path leads. Memorize it. I will send you along a path afterwards.\n"
LINE = "{a} leads to {b}."
LAST = "{a} is the end."
QUESTION = "\nQuestion: Which entries of the table take you from {start} to the end of its path?"
PREFIX = " Answer: The path runs as follows.\n"


@dataclass(frozen=True)
class Chain(LaidOut):
    """A table of paths whose lines are shuffled; a question asks for one path from its start to its end, line by line.

    The reply is right if its end is: every line of the reply tells which line of the table is needed next.
    """

    # lines of the path up to its end, at least 1. Other paths, up to twice as long, fill the table.
    steps: Positive = 64
    max_new_tokens: Positive = 1024  # room for the reply

    def layout(self, request: Request, rng: random.Random) -> Layout:
        """See `LaidOut.layout`; a unit of filler is a line of another path."""
        names = _names(rng)
        paths = [list(islice(names, self.steps)) for _ in range(request.questions)]
        lines = [line for path in paths for line in _lines(path)]
        others = (line for _ in count() for line in _lines(list(islice(names, rng.randint(1, 2 * self.steps)))))

        def arrange(units: list[str]) -> list[str]:
            table = [*lines, *units]
            rng.shuffle(table)
            return table

        return Layout(HEADER, lines, tuple(map(_ask, paths)), Filler.lines(request, lambda: next(others)), arrange)


def _names(rng: random.Random) -> Iterator[str]:
    """Yield distinct names without end: the nouns in a random order, then with numbers behind them."""
    nouns = list(haystack.words("nouns"))
    rng.shuffle(nouns)
    yield from nouns
    for number in count(2):
        yield from (f"{noun}{number}" for noun in nouns)


def _lines(path: list[str]) -> list[str]:
    return [*(LINE.format(a=a, b=b) for a, b in pairwise(path)), LAST.format(a=path[-1])]


def _ask(path: list[str]) -> Question:
    lines = _lines(path)
    return Question(QUESTION.format(start=path[0]), PREFIX, (lines[-1],), "\n".join(lines))
