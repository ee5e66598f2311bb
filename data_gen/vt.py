"""RULER variable tracking: chains of assignments in noise; name every variable that holds a value. Always 1-shot."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise

from data_gen import haystack
from data_gen.niah import _bos
from data_gen.sample import Document, Question
from data_gen.tokens import TokenCounter

HEADER = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)


@dataclass(frozen=True)
class VariableTracking:
    """num_chains chains of num_hops + 1 variables each; a question asks for one chain.

    example_lines: noise lines of the worked example.
    """

    num_chains: int = 1
    num_hops: int = 4
    example_lines: int = 10
    max_new_tokens: int = 30

    def build(
        self,
        name: str,
        length: int,
        counter: TokenCounter,
        seed: int,
        index: int,
        questions: int = 1,
        exact: bool = True,
        essays: str | None = None,
        split: str = "all",
    ) -> Document:
        """One document; `questions` above `num_chains` adds chains. Raises ValueError where `length` is too short."""
        rng = random.Random(f"{name}/{seed}/{index}")
        example_chain, example_value = _chain(self.num_hops, 3, rng)
        example = _scatter([haystack.NOISE_LINE] * self.example_lines, [_lines(example_chain, example_value)], rng)
        shot = (
            HEADER
            + "\n".join(example)
            + QUESTION.format(value=example_value)
            + PREFIX.format(count=len(example_chain), value=example_value)
            + f" {' '.join(example_chain)}\n\n"
        )
        chains = [_chain(self.num_hops, 5, rng) for _ in range(max(self.num_chains, questions))]
        asked = [
            Question(
                QUESTION.format(value=value),
                PREFIX.format(count=len(chain), value=value),
                tuple(chain),
                " ".join(chain),
            )
            for chain, value in chains[:questions]
        ]
        lines = [_lines(chain, value) for chain, value in chains]
        tail = max(
            counter.counts([q.question + q.answer_prefix + (q.target if exact else "") for q in asked], remember=False)
        )
        fixed = counter.count(shot + HEADER) + tail + (0 if exact else self.max_new_tokens) + _bos(counter)
        fixed += sum(counter.counts([line + "\n" for chain_lines in lines for line in chain_lines], remember=False))
        if fixed > length:
            raise ValueError(
                f"length={length} is too short for task {name!r}: its example, chains and question alone take "
                f"{fixed} tokens; raise length or lower questions={questions}"
            )
        units = haystack.take_noise(length - fixed, counter, exact)
        context = shot + HEADER + "\n".join(_scatter(units, lines, rng))
        total = length if exact else fixed + sum(counter.counts([u + "\n" for u in units]))
        return Document(name, seed, index, context, tuple(asked), self.max_new_tokens, total)


def _chain(num_hops: int, name_length: int, rng: random.Random) -> tuple[list[str], str]:
    names: dict[str, None] = {}
    while len(names) < num_hops + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=name_length))] = None
    return list(names), str(rng.randint(10_000, 99_999))


def _lines(chain: list[str], value: str) -> list[str]:
    return [f"VAR {chain[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in pairwise(chain)]


def _scatter(units: list[str], chains: list[list[str]], rng: random.Random) -> list[str]:
    """Every chain's lines at random places among the units, each chain in its own order."""
    placed: list[tuple[int, int, str]] = []
    for chain in chains:
        places = sorted(rng.randint(0, len(units)) for _ in chain)
        placed += [(place, len(placed) + i, line) for i, (place, line) in enumerate(zip(places, chain, strict=True))]
    out: list[str] = []
    start = 0
    for place, _, line in sorted(placed):
        out += units[start:place]
        out.append(line)
        start = place
    return out + units[start:]
