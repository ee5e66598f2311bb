"""Arithmetic problems in the form of GSM-Infinite, each of which its text alone is enough to solve.

A problem is a graph of quantities (`data_gen.gsm.graph`) in the words of a template (`data_gen.gsm.words`). `op` counts
the edges on the way to the answer: every quantity and every number that a definition names.

    normalforward    every value can be computed in turn
    forwardreverse   one value is unknown and a total is given: solve for the unknown (linear, with one solution)
    d = 2 (medium)   numbers and totals
    d = 3 (hard)     also averages, and totals of parts

Names and code are this project's own: the official generator has no licence, and some of its reverse problems have no
solution.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leank.data_gen.gsm.graph import Graph, Quantity, grown, solve_for
from leank.data_gen.gsm.words import TEMPLATES as _TEMPLATES
from leank.data_gen.gsm.words import Template
from leank.data_gen.tokens import TokenCounter

MODES = ("normalforward", "forwardreverse")
TEMPLATES = tuple(_TEMPLATES)
LARGEST = 1000  # a problem is drawn anew if a quantity on its path is larger
# the fewest and the most statements that the answer does not need, without filler; counted in the official problems
_DISTRACTORS = {"medium": (1, 5), "medium, op of at least 10": (0, 1), "hard": (4, 16)}
# 40, 5 and 5 per cent of all problems, in each of the two modes
_MIX = ("crazy_zootopia",) * 8 + ("teachers_in_school", "movie_festival_awards")


@dataclass(frozen=True)
class Problem:
    """A problem as `eval` reads it."""

    problem: str  # problem, question: the text
    question: str
    solution: str  # the value of every quantity on the way, each after those it follows from; an unknown comes first
    answer: int  # the value of the quantity asked for
    op: int  # edges on the solution path
    template: str  # template, mode: one of `TEMPLATES`, one of `MODES`
    mode: str
    length: int  # the nominal length in tokens (0, 8000, ..)
    d: int  # 2 (medium) or 3 (hard)
    id: str  # unique among all problems


def realistic(
    op: int, d: int, template: str, mode: str, seed: int, index: int, length: int = 0,
    counter: TokenCounter | None = None,
) -> Problem:  # fmt: skip
    """Make one problem; the same arguments give the same one. Raises ValueError if it needs more names than there are.

    op, d, template, mode, seed, index, length: see `Problem`, whose filler needs `counter`. As in the benchmark, it has
    a statement of about 30 tokens per 40 tokens of length - 1000 - 7 times the problem's, so that samples are shorter.
    """
    words = _TEMPLATES[template]
    rng = random.Random(f"gsm_infinite/{template}/{mode}/{op}/{d}/{seed}/{index}")
    graph, asked, unknown = _solvable(op, d, words, mode == "forwardreverse", rng)
    core = dict(graph.definitions)
    lines = [words.sentence(q, made) for q, made in core.items() if q.what in ("number", "average") and q != unknown]
    if unknown is not None:
        lines.append(f"{words.subject(unknown)} is not given, but it is greater than 0.")
        lines.append(f"{words.subject(asked)} equals {graph.values[asked]}.")
    few, many = _DISTRACTORS["hard" if d == 3 else "medium" if op < 10 else "medium, op of at least 10"]
    lines += [words.sentence(*graph.distract(rng.randint(0, 2))) for _ in range(rng.randint(few, many))]
    if length:
        assert counter is not None
        graph.kinds, graph.places = words.names()
        spare = length - 1000 - 7 * counter.count(" ".join(lines), remember=False)
        lines += [words.sentence(*graph.distract(rng.choice((1, 1, 1, 2)))) for _ in range(spare // 40)]
    rng.shuffle(lines)
    answer = unknown if unknown is not None else asked
    steps = [f"{words.subject(q)} is {graph.values[q]}." for q in reversed(core)]
    return Problem(
        problem=" ".join(lines),
        question=f"What is {words.name(answer)}?",
        solution=" ".join([*steps, f"Answer: {graph.values[answer]}."]),
        answer=graph.values[answer],
        op=op, template=template, mode=mode, length=length, d=d, id=f"{template}/{mode}/{d}/{op}/{seed}/{index}",
    )  # fmt: skip


def nth(d: int, length: int, op: int, index: int, seed: int = 42, counter: TokenCounter | None = None) -> Problem:
    """Make problem `index` of an op in the benchmark's mix (40, 5, 5% in each mode); see `realistic`."""
    return realistic(op, d, _MIX[index // 2 % len(_MIX)], MODES[index % 2], seed, index, length, counter)


def _solvable(
    op: int, d: int, words: Template, reverse: bool, rng: random.Random
) -> tuple[Graph, Quantity, Quantity | None]:
    """Draw graphs until the values of one are small and, in reverse, one of its numbers can be solved for."""
    while True:
        graph, asked = grown(op, d, *words.names(), reverse, rng)
        unknown = solve_for(graph, asked, rng) if reverse else None
        if max(graph.values.values()) <= LARGEST and (not reverse or unknown is not None):
            return graph, asked, unknown
