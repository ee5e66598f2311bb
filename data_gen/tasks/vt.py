"""RULER's variable tracking: chains of assignments in noise, of which one holds the value in question; 1-shot."""

import random
import string
from dataclasses import dataclass
from itertools import pairwise

from leank.data_gen import haystack
from leank.data_gen.task import Filler, LaidOut, Layout, Question, Request
from leank.typed import Count, Positive

HEADER = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)
EXAMPLE_TOKENS = 500  # RULER sizes the worked example like a sample of this length


@dataclass(frozen=True)
class _Chain:
    """Variables that pass a value on: the first is assigned the value, every other one its predecessor."""

    names: tuple[str, ...]
    value: str

    def lines(self) -> list[str]:
        return [f"VAR {self.names[0]} = {self.value}"] + [f"VAR {b} = VAR {a} " for a, b in pairwise(self.names)]

    def ask(self) -> Question:
        return Question(
            QUESTION.format(value=self.value),
            PREFIX.format(count=len(self.names), value=self.value),
            self.names,
            " ".join(self.names),
        )


@dataclass(frozen=True)
class VariableTracking(LaidOut):
    """A chain of num_hops + 1 variables for each question, which asks for all of them."""

    num_hops: Count = 4  # assignments from variable to variable per chain, at least 0
    # noise lines of the worked example; None for as many as fit into `EXAMPLE_TOKENS`, as in RULER
    example_lines: Count | None = None
    max_new_tokens: Positive = 30  # room for the reply

    def layout(self, request: Request, rng: random.Random) -> Layout:
        """See `LaidOut.layout`; the header is the worked example, a unit of filler is a line of noise."""
        count = request.questions
        values = [str(v) for v in rng.sample(range(10_000, 99_999), count + 1)]
        example = _Chain(_names(self.num_hops + 1, 3, rng), values[0])
        names = _names(count * (self.num_hops + 1), 5, rng)
        size = self.num_hops + 1
        chains = [_Chain(names[i * size : (i + 1) * size], values[i + 1]) for i in range(count)]
        size = self.example_lines if self.example_lines is not None else self._example_lines(request)
        ask = example.ask()
        shot = (
            HEADER
            + "\n".join(_scatter([haystack.NOISE_LINE] * size, [example], rng))
            + ask.question
            + ask.answer_prefix
            + f" {ask.target}\n\n"
        )
        lines = [line for chain in chains for line in chain.lines()]
        asked = tuple(chain.ask() for chain in chains)
        return Layout(shot + HEADER, lines, asked, Filler.noise(request), lambda units: _scatter(units, chains, rng))

    def _example_lines(self, request: Request) -> int:
        """Find the size of the example once per seed, so that all samples show one of the same size."""
        counter = request.counter
        key = (self, "example", request.seed)
        if key not in counter.fits:
            rng = random.Random(f"{request.name}/{request.seed}/example")
            example = _Chain(_names(self.num_hops + 1, 3, rng), str(rng.randint(10_000, 99_999)))
            ask = example.ask()
            text = HEADER + "\n".join(example.lines()) + ask.question + ask.answer_prefix
            free = EXAMPLE_TOKENS - self.max_new_tokens - counter.count(text, remember=False)
            counter.fits[key] = max(1, free // counter.pieces([haystack.NOISE_LINE], "\n")[0])
        return counter.fits[key]


def _names(n: int, length: int, rng: random.Random) -> tuple[str, ...]:
    names: dict[str, None] = {}
    while len(names) < n:
        names["".join(rng.choices(string.ascii_uppercase, k=length))] = None
    return tuple(names)


def _scatter(units: list[str], chains: list[_Chain], rng: random.Random) -> list[str]:
    """Put the lines of every chain at random places among the units, in the chain's order."""
    placed: list[tuple[int, str]] = []
    for chain in chains:
        lines = chain.lines()
        placed += zip(haystack.random_places(len(units), len(lines), rng), lines, strict=True)
    return haystack.insert(units, placed)
