"""Arithmetic problems in the form of GSM-Infinite, each of which its text alone is enough to solve.

A problem is a graph of quantities in the words of a template. `op` counts the edges on the way to the answer: every
quantity and every number that a definition names. The graph is built backwards from the quantity that is asked for. A
quantity is defined by quantities that have no definition yet, so definitions never run in a circle, and the answer
needs every one of them. Distractors and filler are defined by quantities of the problem and never feed them.

    normalforward    every value can be computed in turn
    forwardreverse   one value is unknown and a total is given: solve for the unknown (linear, with one solution)
    d = 2 (medium)   numbers and totals
    d = 3 (hard)     also averages, and totals of parts

Names and code are this project's own: the official generator has no licence, and some of its reverse problems have no
solution.
"""

import random
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import product

import yaml

from leank.data_gen.amount import amount
from leank.data_gen.tokens import TokenCounter

MODES = ("normalforward", "forwardreverse")
LARGE = 60  # a quantity above this is no longer multiplied
LARGEST = 1000  # a problem is drawn anew if a quantity on its path is larger
# the fewest and the most statements that the answer does not need, without filler; counted in the official problems
_DISTRACTORS = {"medium": (1, 5), "medium, op of at least 10": (0, 1), "hard": (4, 16)}
# 40, 5 and 5 per cent of all problems, in each of the two modes
_MIX = ("crazy_zootopia",) * 8 + ("teachers_in_school", "movie_festival_awards")


@dataclass(frozen=True)
class Quantity:
    """Something that a problem counts."""

    what: str  # "number" or "average" of a kind in a place; "total" of a place; "grand", the total of a place's parts
    place: str  # where it is counted
    kind: str = ""  # what is counted; empty for "total" and "grand"

    @property
    def needs(self) -> int:
        """The fewest edges that its definition takes."""
        return {"total": 2, "grand": 4}.get(self.what, 1)


@dataclass
class Definition:
    """What a quantity equals."""

    refs: list[Quantity]  # the quantities that the definition names
    constant: int | None = None  # the number that it names, None if it names none
    difference: bool = False  # whether the two quantities are subtracted; they are added otherwise
    times: bool = False  # whether the constant multiplies the quantities; it is added otherwise


@dataclass
class Graph:
    """Definitions in the order in which they were made; each names only quantities that are defined after it."""

    d: int  # 2 (medium) or 3 (hard)
    kinds: list[str]  # kinds, places: names for new quantities
    places: list[str]
    rng: random.Random  # the source of every choice
    definitions: dict[Quantity, Definition] = field(default_factory=dict)  # quantity -> its definition
    open: list[Quantity] = field(default_factory=list)  # quantities that are named and not defined yet
    taken: set[Quantity] = field(default_factory=set)  # quantities that are named
    # places with a total; no further quantity of such a place may be named
    closed: set[str] = field(default_factory=set)
    values: dict[Quantity, int] = field(default_factory=dict)  # quantity -> its value

    def grow(self, target: str, op: int) -> Quantity:
        """Define a quantity of the form `target` ("number", "total", ..) in exactly `op` edges, and return it."""
        asked = self._new(target)
        self.open.append(asked)
        left = op
        while self.open:
            left -= self._define(self.open.pop(self.rng.randrange(len(self.open))), left)
        self._evaluate()
        return asked

    def distract(self, refs: int) -> tuple[Quantity, Definition]:
        """Return a quantity that nothing depends on; up to `refs` quantities, or a number, define it."""
        known = list(self.definitions)  # not other distractors: they would grow without end
        new = self._new(self._simple())
        made = Definition(self.rng.sample(known, min(len(known), refs)))
        if not made.refs or self.rng.random() < 0.3:
            made.constant = self.rng.randint(2, 4)
        self._join(new, made)
        return new, made

    def _simple(self) -> str:
        return "average" if self.d == 3 and self.rng.random() < 0.5 else "number"

    def _new(self, what: str) -> Quantity:
        """Name a quantity of the form `what` for the first time; a total closes its place."""
        if what in ("total", "grand"):
            place = self.rng.choice(self._unused())
            self.closed.add(place)
            found = Quantity(what, place)
        else:
            places = [p for p in self.places if p not in self.closed]
            for _ in range(10_000):
                found = Quantity(what, self.rng.choice(places), self.rng.choice(self.kinds))
                if found not in self.taken:
                    break
            else:
                raise ValueError(f"all names are taken after {amount(len(self.taken), 'quantity')}; lower op or length")
        self.taken.add(found)
        return found

    def _unused(self) -> list[str]:
        """Return the places of which no quantity has been named yet."""
        used = {q.place for q in self.taken}
        return [p for p in self.places if p not in used]

    def _define(self, q: Quantity, left: int) -> int:
        """Define `q` in at most `left` edges, leave enough for the open quantities, and return the edges taken."""
        spare = left - sum(o.needs for o in self.open)  # for q and whatever it brings in
        if q.what in ("total", "grand"):
            each = 2 if q.what == "grand" else 1
            kinds = self.rng.sample(self.kinds, self.rng.randint(1, min(3, spare // (2 * each))))
            whats = ("number", "average") if q.what == "grand" else ("number",)
            parts = [Quantity(what, q.place, kind) for kind in kinds for what in whats]
            self.taken |= set(parts)
            self.open += parts
            self.definitions[q] = Definition(parts)
            return len(parts)
        return self._define_value(q, spare)

    def _define_value(self, q: Quantity, spare: int) -> int:
        """Define a number or an average in at most `spare` edges; new quantities take some of them later."""
        if spare == 1 or (self.open and self.rng.random() < 0.25):
            self.definitions[q] = Definition([], constant=self.rng.randint(1, 4))
            return 1
        reuse, totals = ((0, 0, 1, 1, 2), 0.2) if self.d == 3 else ((0, 1, 2, 2), 0.4)  # medium: fewer, denser
        constant = spare > 2 and self.rng.random() < 0.5
        room = spare - constant
        refs = self.rng.sample(self.open, min(len(self.open), self.rng.choice(reuse), room - 2))
        room -= len(refs)
        for _ in range(self.rng.randint(1, 2)):
            what = "total" if room >= 3 and self.rng.random() < totals and self._unused() else self._simple()
            if room >= 2:
                new = self._new(what)
                room -= 1 + new.needs
                self.open.append(new)
                refs.append(new)
        self.rng.shuffle(refs)
        self.definitions[q] = Definition(refs, constant=self.rng.randint(2, 4) if constant else None)
        return len(refs) + constant

    def _evaluate(self) -> None:
        for q, made in reversed(self.definitions.items()):
            if q.what == "total":
                self.values[q] = sum(self.values[r] for r in made.refs)
            elif q.what == "grand":
                pairs = zip(made.refs[::2], made.refs[1::2], strict=True)
                self.values[q] = sum(self.values[n] * self.values[a] for n, a in pairs)
            else:
                self._join(q, made)

    def _join(self, q: Quantity, made: Definition) -> None:
        """Choose how a definition joins what it names, so that its value is positive and small."""
        value = sum(self.values[r] for r in made.refs)
        if len(made.refs) == 2 and (value > LARGE or self.rng.random() < 0.5):
            small, large = sorted(made.refs, key=self.values.__getitem__)
            if self.values[small] < self.values[large]:
                made.refs, made.difference = [large, small], True
                value = self.values[large] - self.values[small]
        if made.constant is not None and made.refs:
            made.times = value <= LARGE and self.rng.random() < 0.5
            value = value * made.constant if made.times else value + made.constant
        self.values[q] = value if made.refs else made.constant or 0


def grown(
    op: int, d: int, kinds: list[str], places: list[str], reverse: bool, rng: random.Random
) -> tuple[Graph, Quantity]:
    """Return a graph with a path of `op` edges, and the quantity that the path ends in.

    kinds, places: all names of the template; a graph takes a few of them.
    reverse: whether the quantity must be the total of a place, which a problem then gives.
    """
    few = rng.sample(places, min(len(places), 7 + op // 3))
    graph = Graph(d, rng.sample(kinds, 4), few[2:], rng)
    targets = ["total"]
    if not reverse:
        targets += ["number", "average"] + ["grand"] * (op >= 4) if d == 3 else ["total", "total", "number"]
    asked = graph.grow(rng.choice(targets), op)
    graph.places = few  # two of them have no total, so that distractors find a place
    return graph, asked


def solve_for(graph: Graph, given: Quantity, rng: random.Random) -> Quantity | None:
    """Return a quantity defined by a number alone that the total `given` determines; None if there is none."""
    leaves = [q for q, made in graph.definitions.items() if not made.refs]
    for unknown in rng.sample(leaves, len(leaves)):
        slope = {unknown: 1}
        for q, made in reversed(graph.definitions.items()):
            if q != unknown:
                signs = [1, -1] if made.difference else [1] * len(made.refs)
                change = sum(s * slope[r] for s, r in zip(signs, made.refs, strict=True))
                slope[q] = change * (made.constant or 1) if made.times else change
        if slope[given]:
            return unknown
    return None


@dataclass(frozen=True)
class Template:
    """The words of a template."""

    kinds: tuple[list[str], list[str]]  # first and second words of a kind; a blank joins them
    places: tuple[list[str], list[str]]  # first and second parts of a place; nothing joins them
    average: str  # average, total, grand: how a quantity of that form is called, with {kind} and {place}
    total: str
    grand: str

    def names(self) -> tuple[list[str], list[str]]:
        """Return all kinds and all places."""
        return [f"{a} {b}" for a, b in product(*self.kinds)], [a + b for a, b in product(*self.places)]

    def name(self, q: Quantity) -> str:
        """Return what a quantity is called inside a sentence."""
        forms = {"total": self.total, "grand": self.grand, "average": self.average}
        return forms.get(q.what, "the number of {kind} in {place}").format(kind=q.kind, place=q.place)

    def subject(self, q: Quantity) -> str:
        """Return what a quantity is called at the start of a sentence."""
        name = self.name(q)
        return name[0].upper() + name[1:]

    def sentence(self, q: Quantity, made: Definition) -> str:
        """Return the statement of a definition."""
        names = [self.name(r) for r in made.refs]
        if not names:
            return f"{self.subject(q)} equals {made.constant}."
        if made.difference:
            text = f"the difference between {names[0]} and {names[1]}"
        elif len(names) > 1:
            text = "the sum of " + ", ".join(names[:-1]) + ("," if len(names) > 2 else "") + f" and {names[-1]}"
        else:
            text = names[0]
        if made.constant is not None:
            text = f"{made.constant} {'times' if made.times else 'plus'} {text}"
        return f"{self.subject(q)} equals {text}."


_TEMPLATES = {
    name: Template(**words)
    for name, words in yaml.safe_load(
        files("leank.data_gen").joinpath("assets", "gsm_templates.yaml").read_text(encoding="utf-8")
    ).items()
}
TEMPLATES = tuple(_TEMPLATES)


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
