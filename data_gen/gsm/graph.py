"""The graph of quantities behind an arithmetic problem: how it grows, what its values are, what can be solved for.

The graph is built backwards from the quantity that is asked for. A quantity is defined by quantities that have no
definition yet, so definitions never run in a circle, and the answer needs every one of them. Distractors and filler
are defined by quantities of the problem and never feed them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from leank.data_gen.amount import amount

LARGE = 60  # a quantity above this is no longer multiplied


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
