"""Arithmetic problems in the form of GSM-Infinite, every one solvable from its text alone.

A problem is a graph of quantities. It is built backwards from the quantity that is asked for: a quantity is defined by
quantities that are not defined yet, so no definition can run in a circle, and nothing is defined that the answer does
not need. `op` counts the edges on the way to the answer: every quantity and every number that a definition names.
Distractors and filler are defined by quantities of the problem and never feed them.

    normalforward    every value can be computed in turn
    forwardreverse   one value is unknown, a total is given: solve for the unknown (always linear, one solution)
    d = 2 (medium)   numbers and totals;  d = 3 (hard)   averages and totals of parts too

Own names and code: the official generator has no licence, and its reverse problems are not all solvable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from data_gen.tokens import TokenCounter

MODES = ("normalforward", "forwardreverse")
LARGE = 60  # a quantity above this is not multiplied any more
LARGEST = 1000  # a problem on whose path a quantity is larger is drawn anew
# fewest and most statements that the answer does not need, without filler; counted in the official problems
_DISTRACTORS = {"medium": (1, 5), "medium, op of at least 10": (0, 1), "hard": (4, 16)}
# 40, 5 and 5 per cent of the problems in each of the two modes
_MIX = ("crazy_zootopia",) * 8 + ("teachers_in_school", "movie_festival_awards")


@dataclass(frozen=True)
class _Template:
    """Words of a template: a kind is a first and a second word, a place a first and a second part without a blank."""

    kinds: tuple[str, str]
    places: tuple[str, str]
    average: str
    total: str
    grand: str

    def names(self) -> tuple[list[str], list[str]]:
        """All kinds and all places."""
        kinds = [f"{a} {b}" for a, b in product(self.kinds[0].split(","), self.kinds[1].split(","))]
        return kinds, [a + b for a, b in product(self.places[0].split(","), self.places[1].split(","))]


_TEMPLATES = {
    "crazy_zootopia": _Template(
        ("adult", "lynx,badger,otter,ibis,gecko,heron,tortoise,lemur,beaver,moose,hare,seal,whale,swan,goose,duck,frog,"
         "toad,newt,snake,lizard,camel,goat,sheep,horse,pony,mouse,bat,mole,hedgehog,shark,trout,salmon,crab,spider,"
         "beetle,ant,moth,falcon,stork"),
        ("Amber,Birch,Cobalt,Dawn,Ember,Fern,Garnet,Hazel,Indigo,Juniper,Kestrel,Lark",
         " Hollow, Ridge, Marsh, Grove, Bay, Meadow, Canyon, Reserve"),
        "the average number of newborn children per {kind} in {place}", "the total number of adult animals in {place}",
        "the total number of newborn animal children in {place}",
    ),
    "teachers_in_school": _Template(
        ("evening,weekend,bilingual,rural,coastal,charter,northern,southern,technical,preparatory",
         "drama school,nursing school,trade school,primary school,music school,sailing school,law school,"
         "farming school,language school,art school"),
        ("Alder,Brook,Cedar,Dover,Elm,Fairview,Glen,Harbor,Iron,Jasper,Kings,Lime",
         "ton,field,ford,haven,gate,mount,stead,wick"),
        "the average number of teachers per {kind} in {place}", "the total number of schools in {place}",
        "the total number of teachers from all schools in {place}",
    ),
    "movie_festival_awards": _Template(
        ("silent,animated,black-and-white,epic,low-budget,musical,wordless,historical,experimental,seaside",
         "heist movie,ghost story,courtroom drama,sports movie,road comedy,spy thriller,family saga,war drama,"
         "nature film,space opera"),
        ("Silver,Lantern,Harvest,Winter,Harbour,Mosaic,Comet,Orchard,Velvet,Copper,Monsoon,Prairie",
         " Reel Festival, Screen Days, Film Week, Cinema Fair, Picture Gala, Short Cuts, Premieres, Biennale"),
        "the average number of nominations per {kind} in {place}", "the total number of movies in {place}",
        "the total number of movie nominations from all movies in {place}",
    ),
}  # fmt: skip
TEMPLATES = tuple(_TEMPLATES)


@dataclass(frozen=True)
class Problem:
    """A problem as `eval` reads it: `answer` is an integer, `length` the nominal one (0, 8000, ..), `d` 2 or 3.

    solution: the value of every quantity on the way, each after those it follows from (an unknown comes first).
    """

    problem: str
    question: str
    solution: str
    answer: int
    op: int
    template: str
    mode: str
    length: int
    d: int
    id: str


@dataclass(frozen=True)
class _Quantity:
    """what: "number" or "average" of a kind in a place, "total" or "grand" (total of the parts) of a place."""

    what: str
    place: str
    kind: str = ""

    @property
    def needs(self) -> int:
        """Edges that defining it takes at least."""
        return {"total": 2, "grand": 4}.get(self.what, 1)


@dataclass
class _Definition:
    """refs: quantities named. constant: the number named, if any. difference, times: how they are joined."""

    refs: list[_Quantity]
    constant: int | None = None
    difference: bool = False
    times: bool = False


@dataclass
class _Graph:
    """Definitions in the order in which they were made: each names only quantities that come later."""

    d: int
    kinds: list[str]
    places: list[str]
    rng: random.Random
    definitions: dict[_Quantity, _Definition] = field(default_factory=dict)
    open: list[_Quantity] = field(default_factory=list)
    taken: set[_Quantity] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)  # places with a total: nothing else may be mentioned there
    values: dict[_Quantity, int] = field(default_factory=dict)

    def grow(self, target: str, op: int) -> _Quantity:
        """Define a quantity of the kind `target` in exactly `op` edges; the quantity."""
        asked = self._new(target)
        self.open.append(asked)
        left = op
        while self.open:
            left -= self._define(self.open.pop(self.rng.randrange(len(self.open))), left)
        self._evaluate()
        return asked

    def distract(self, refs: int) -> tuple[_Quantity, _Definition]:
        """A quantity that nothing depends on, defined by so many quantities there are, or by a number."""
        known = list(self.definitions)  # not other distractors: they would grow without end
        new = self._new(self._simple())
        made = _Definition(self.rng.sample(known, min(len(known), refs)))
        if not made.refs or self.rng.random() < 0.3:
            made.constant = self.rng.randint(2, 4)
        self._join(new, made)
        return new, made

    def _simple(self) -> str:
        return "average" if self.d == 3 and self.rng.random() < 0.5 else "number"

    def _new(self, what: str) -> _Quantity:
        """A quantity of that kind which nothing has named yet; the place of a total is its own from now on."""
        if what in ("total", "grand"):
            place = self.rng.choice(self._unused())
            self.closed.add(place)
            found = _Quantity(what, place)
        else:
            places = [p for p in self.places if p not in self.closed]
            for _ in range(10_000):
                found = _Quantity(what, self.rng.choice(places), self.rng.choice(self.kinds))
                if found not in self.taken:
                    break
            else:
                raise ValueError(f"all names are taken after {len(self.taken)} quantities; lower length")
        self.taken.add(found)
        return found

    def _unused(self) -> list[str]:
        """Places of which nothing has been named yet."""
        used = {q.place for q in self.taken}
        return [p for p in self.places if p not in used]

    def _define(self, q: _Quantity, left: int) -> int:
        """Define `q` with at most `left` edges, leaving enough for the open ones; the edges it took."""
        spare = left - sum(o.needs for o in self.open)  # for q and whatever it brings in
        if q.what in ("total", "grand"):
            each = 2 if q.what == "grand" else 1
            kinds = self.rng.sample(self.kinds, self.rng.randint(1, min(3, spare // (2 * each))))
            whats = ("number", "average") if q.what == "grand" else ("number",)
            parts = [_Quantity(what, q.place, kind) for kind in kinds for what in whats]
            self.taken |= set(parts)
            self.open += parts
            self.definitions[q] = _Definition(parts)
            return len(parts)
        if spare == 1 or (self.open and self.rng.random() < 0.25):
            self.definitions[q] = _Definition([], constant=self.rng.randint(1, 4))
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
        self.definitions[q] = _Definition(refs, constant=self.rng.randint(2, 4) if constant else None)
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

    def _join(self, q: _Quantity, made: _Definition) -> None:
        """Choose how a definition joins what it names, so that its value is positive and stays small."""
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


def realistic(
    op: int, d: int, template: str, mode: str, seed: int, index: int, length: int = 0,
    counter: TokenCounter | None = None,
) -> Problem:  # fmt: skip
    """One problem, the same for the same arguments.

    op: edges on the solution path, at least 2. d: 2 (medium) or 3 (hard). length: 0, or the nominal tokens. As in the
    benchmark the filler is a statement for every 40 tokens of length - 1000 - 7 times the problem (tokens by
    `counter`); statements take about 30, so that samples are shorter than their name says.

    Raises ValueError for a setting out of range, or where the length asks for more statements than there are names.
    """
    if template not in _TEMPLATES:
        raise ValueError(f"template={template!r} is unknown; choose one of {', '.join(TEMPLATES)}")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}")
    if d not in (2, 3) or op < 2 or length < 0:
        raise ValueError(f"d={d}, op={op}, length={length}: give d 2 or 3, op of at least 2 and length of at least 0")
    if length and counter is None:
        raise ValueError(f"length={length} needs a counter; give TokenCounter(tokenizer)")
    words = _TEMPLATES[template]
    rng = random.Random(f"gsm_infinite/{template}/{mode}/{op}/{d}/{seed}/{index}")
    while True:
        graph, asked = _core(op, d, words, mode, rng)
        unknown = _solve_for(graph, asked, rng) if mode == "forwardreverse" else None
        if max(graph.values.values()) <= LARGEST and (mode == "normalforward" or unknown is not None):
            break
    core = dict(graph.definitions)
    lines = [_sentence(words, q, made) for q, made in core.items() if q.what in ("number", "average") and q != unknown]
    if unknown is not None:
        lines.append(f"{_capital(_name(words, unknown))} is not given, but it is greater than 0.")
        lines.append(f"{_capital(_name(words, asked))} equals {graph.values[asked]}.")
    few, many = _DISTRACTORS["hard" if d == 3 else "medium" if op < 10 else "medium, op of at least 10"]
    lines += [_sentence(words, *graph.distract(rng.randint(0, 2))) for _ in range(rng.randint(few, many))]
    if length and counter is not None:
        graph.kinds, graph.places = words.names()
        spare = length - 1000 - 7 * counter.count(" ".join(lines), remember=False)
        lines += [_sentence(words, *graph.distract(rng.choice((1, 1, 1, 2)))) for _ in range(spare // 40)]
    rng.shuffle(lines)
    answer = unknown if unknown is not None else asked
    steps = [f"{_capital(_name(words, q))} is {graph.values[q]}." for q in reversed(core)]
    return Problem(
        problem=" ".join(lines),
        question=f"What is {_name(words, answer)}?",
        solution=" ".join([*steps, f"Answer: {graph.values[answer]}."]),
        answer=graph.values[answer],
        op=op, template=template, mode=mode, length=length, d=d, id=f"{template}/{mode}/{d}/{op}/{seed}/{index}",
    )  # fmt: skip


def nth(d: int, length: int, op: int, index: int, seed: int = 42, counter: TokenCounter | None = None) -> Problem:
    """Problem number `index` of an op, in the benchmark's mix of templates and modes (40, 5 and 5 per cent a mode)."""
    return realistic(op, d, _MIX[index // 2 % len(_MIX)], MODES[index % 2], seed, index, length, counter)


def benchmark(
    d: int, length: int, ops: Sequence[int], count: int, seed: int = 42, counter: TokenCounter | None = None
) -> Iterator[Problem]:
    """The first `count` problems of each op, see `nth`."""
    for op in ops:
        for index in range(count):
            yield nth(d, length, op, index, seed, counter)


def _core(op: int, d: int, words: _Template, mode: str, rng: random.Random) -> tuple[_Graph, _Quantity]:
    kinds, places = words.names()
    few = rng.sample(places, min(len(places), 7 + op // 3))
    graph = _Graph(d, rng.sample(kinds, 4), few[2:], rng)
    targets = ["total"]
    if mode == "normalforward":
        targets += ["number", "average"] + ["grand"] * (op >= 4) if d == 3 else ["total", "total", "number"]
    asked = graph.grow(rng.choice(targets), op)
    graph.places = few  # two that have no total, for distractors
    return graph, asked


def _solve_for(graph: _Graph, given: _Quantity, rng: random.Random) -> _Quantity | None:
    """A quantity given as a number which the total `given` determines; None where there is none."""
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


def _name(words: _Template, q: _Quantity) -> str:
    form = {"total": words.total, "grand": words.grand, "average": words.average}.get(
        q.what, "the number of {kind} in {place}"
    )
    return form.format(kind=q.kind, place=q.place)


def _sentence(words: _Template, q: _Quantity, made: _Definition) -> str:
    names = [_name(words, r) for r in made.refs]
    if not names:
        return f"{_capital(_name(words, q))} equals {made.constant}."
    if made.difference:
        text = f"the difference between {names[0]} and {names[1]}"
    elif len(names) > 1:
        text = "the sum of " + ", ".join(names[:-1]) + ("," if len(names) > 2 else "") + f" and {names[-1]}"
    else:
        text = names[0]
    if made.constant is not None:
        text = f"{made.constant} {'times' if made.times else 'plus'} {text}"
    return f"{_capital(_name(words, q))} equals {text}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
