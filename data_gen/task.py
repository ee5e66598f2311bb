"""What a task takes, a `Request`, what it yields, a `Document`, and the base of all tasks, which size it in two ways.

`Task.fill` meets the requested length as closely as tokens allow (training). `Task.draw` makes a document from a number
of whole units, and `whole_units` finds the number that RULER would take. A binary search per (task, length, seed) finds
the largest number with which one draw, the answer prefix and max_new_tokens stay within the length. Samples differ from
that draw by a few tokens. One that is too long loses a whole step (500 words of an essay, 25 lines, 10 documents). That
is why official samples have 3,478 or 4,093 tokens.

Below 4,096 tokens, RULER's shortest length, a step would be most of a sample: 500 words are 700 tokens. There the
search is made for each sample, which falls short by less than a unit.

The official code never ends if a step is larger than the number of units; here the units fall by a quarter at a time.
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge, Le

from leank.data_gen import haystack
from leank.data_gen.haystack import SPLITS
from leank.data_gen.tokens import TokenCounter
from leank.typed import Checked, OneOf

HELD_OUT = 2**31  # the index from which on no step of training takes a document
LONGEST = 2**24  # tokens; no model reads more, and a slip must not fill the memory
SHORT = 4096  # tokens; below, every sample has a search of its own
_SEARCH = -1  # the index of the draw that the search measures


@dataclass(frozen=True)
class Question:
    """One question about a document.

    question: text that follows the document verbatim; it begins with its own separator.
    answer_prefix: the start of the reply, which the model is given after the assistant header.
    answers: the references that a scorer compares with.
    target: the supervised answer: all references, in the order in which a model is trained to write them.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Sample:
    """One row: a `Document` with one `Question`, whose fields it has.

    task, seed, index, context, max_new_tokens, length: see `Document`.
    question, answer_prefix, answers, target: see `Question`; the first two follow the context.
    """

    task: str
    seed: int
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str
    max_new_tokens: int
    length: int


@dataclass(frozen=True)
class Document:
    """A document with its questions.

    task, seed, index: which document.
    context: the text.
    questions: questions about it.
    max_new_tokens: room for a reply.
    length: tokens of the document with its longest question, special tokens and chat template included. A document
        filled exactly also counts that question's answer; one sized as in RULER counts max_new_tokens in its place.
    framed: whether the texts hold the chat template already, so that nothing is to be put around them.
    """

    task: str
    seed: int
    index: int
    context: str
    questions: tuple[Question, ...]
    max_new_tokens: int
    length: int
    framed: bool = False

    def samples(self) -> list[Sample]:
        """Return one flat row per question."""
        about = {name: value for name, value in vars(self).items() if name not in ("questions", "framed")}
        return [Sample(**about, **vars(question)) for question in self.questions]


@dataclass(frozen=True)
class Request(Checked):
    """One document of a task."""

    name: str  # of the task
    length: Annotated[int, Ge(1), Le(LONGEST)]  # tokens of the whole prompt with its reply
    counter: TokenCounter  # counts tokens with the model's tokenizer
    seed: int  # seed, index: which document
    index: int
    questions: Annotated[int, Ge(1), Le(10_000)] = 1  # questions about the document; some tasks have fewer
    # whether the text, the longest question and its answer fill `length`. Otherwise a document has whole units, and
    # prompt + max_new_tokens stay within `length`, as in RULER.
    exact: bool = True
    essays: str | None = None  # essays, split: the natural text; see `haystack.sentences`
    split: Annotated[str, OneOf(*SPLITS)] = "all"
    data: str | None = None  # a file with the task's own data (qa_1, qa_2, cwe, prompts)
    reserve: int = 0  # tokens of `length` to leave for a chat template; see `data_gen.chat`

    @property
    def room(self) -> int:
        """Tokens of `length` that remain for text."""
        return self.length - self.reserve - self.counter.special_tokens

    def rng(self) -> random.Random:
        """Return the document's own random generator."""
        return random.Random(f"{self.name}/{self.seed}/{self.index}")

    def left(self, fixed: int) -> int:
        """Return the tokens that remain after `fixed` ones. Raises ValueError if `fixed` is more than there is."""
        if fixed > self.room:
            raise ValueError(
                f"length={self.length} is too short for task {self.name!r}: without any filler it takes "
                f"{fixed + self.length - self.room} tokens (questions={self.questions}); raise length"
            )
        return self.room - fixed

    def tail(self, questions: Sequence[Question]) -> int:
        """Count the tokens of the longest question with its answer."""
        return max(self.counter.counts([q.question + q.answer_prefix + q.target for q in questions], remember=False))


class Draft(NamedTuple):
    """A document's text with its questions."""

    context: str
    questions: tuple[Question, ...]
    tokens: int = 0  # tokens of the text with its longest question and answer; 0 if nobody has counted them
    framed: bool = False  # see `Document`


class Task(Checked, ABC):
    """A task: `fill`, and for RULER's `draw`, define its documents. Its settings are checked (`leank.typed`).

    max_new_tokens: room for a reply.
    """

    max_new_tokens: int

    def build(self, request: Request) -> Document:
        """Make the document. Raises ValueError if the length is too short, FileNotFoundError if data is missing."""
        if request.exact:
            draft = self.fill(request)
            length = draft.tokens + request.length - request.room
        else:
            draft, length = whole_units(self, request)
        about = (request.name, request.seed, request.index, draft.context, draft.questions)
        return Document(*about, self.max_new_tokens, length, draft.framed)

    @abstractmethod
    def fill(self, request: Request) -> Draft:
        """Return a document of `request.room` tokens, the longest question with its answer included."""

    def draw(self, request: Request, units: int) -> Draft:
        """Return a document with so many whole units of filler, by which needles and questions do not change.

        Raises ValueError for a task that is none of RULER's.
        """
        raise ValueError(f"task {request.name!r} has no whole units to be sized by, as RULER's; use exact=True")

    def step(self, request: Request) -> int:
        """Return the units that RULER takes away at a time from a sample that is too long; 10 where it has no rule."""
        return 10

    def fewest(self, request: Request) -> int:
        """Return the smallest number of units that `draw` accepts."""
        return 0


@dataclass(frozen=True)
class Filler:
    """What fills a document up.

    take: gives as much of it as some tokens hold, and the tokens taken.
    make: gives a number of whole units.
    """

    take: Callable[[int], haystack.Units]
    make: Callable[[int], list[str]]

    @classmethod
    def noise(cls, request: Request) -> Filler:
        """RULER's five short sentences, repeated; a unit is a line of them."""
        return cls(lambda budget: haystack.take_noise(budget, request.counter), lambda n: [haystack.NOISE_LINE] * n)

    @classmethod
    def essay(cls, request: Request, rng: random.Random) -> Filler:
        """Sentences of natural text, from a random place; units are words from the text's beginning."""
        text = request.essays, request.split
        return cls(
            lambda budget: haystack.take_essay(budget, request.counter, rng, *text),
            lambda n: haystack.first_words(n, *text),
        )

    @classmethod
    def lines(cls, request: Request, make_line: Callable[[], str]) -> Filler:
        """Lines that `make_line` makes; a unit is one of them."""
        return cls(
            lambda budget: haystack.take_lines(budget, request.counter, make_line),
            lambda n: [make_line() for _ in range(n)],
        )


@dataclass(frozen=True)
class Layout:
    """A document but for its filler.

    header: what stands before everything else.
    pieces: texts that stand among the filler, such as needles.
    questions: about the document.
    filler: what fills it up.
    arrange: puts the pieces among units of filler.
    separator: what stands between both, a blank or a newline.
    """

    header: str
    pieces: Sequence[str]
    questions: tuple[Question, ...]
    filler: Filler
    arrange: Callable[[list[str]], list[str]]
    separator: str = "\n"

    def text(self, units: list[str]) -> str:
        """Return the whole document."""
        return self.header + self.separator.join(self.arrange(units))


class LaidOut(Task):
    """A task of texts among filler: its `layout` gives both `fill` and `draw`."""

    @abstractmethod
    def layout(self, request: Request, rng: random.Random) -> Layout:
        """Return the document but for its filler, drawn from `rng`."""

    def fill(self, request: Request) -> Draft:
        made, counter = self.layout(request, request.rng()), request.counter
        fixed = counter.count(made.header, remember=False) + request.tail(made.questions)
        fixed += sum(counter.pieces(made.pieces, made.separator, remember=False))
        units, tokens = made.filler.take(request.left(fixed))
        return Draft(made.text(units), made.questions, fixed + tokens)

    def draw(self, request: Request, units: int) -> Draft:
        made = self.layout(request, request.rng())
        return Draft(made.text(made.filler.make(units)), made.questions)


def whole_units(task: Task, request: Request) -> tuple[Draft, int]:
    """Return the document and its length (prompt, answer prefix, max_new_tokens), never above `request.length`.

    Raises ValueError if the fewest units do not fit.
    """
    if request.length < SHORT:
        return _fitting(task, request, _search(task, request))
    fits = request.counter.fits
    key = (task, dataclasses.replace(request, index=_SEARCH, questions=1))
    if key not in fits:
        fits[key] = _search(task, key[1])
    return _fitting(task, request, fits[key])


def _fitting(task: Task, request: Request, units: int) -> tuple[Draft, int]:
    """Return the document of so many units or, as long as that is too long, of fewer; see `whole_units`."""
    step, fewest = task.step(request), task.fewest(request)
    while True:
        draft, length = _measure(task, request, units)
        if length <= request.length:
            return draft, length
        if units <= fewest:
            raise ValueError(
                f"length={request.length} is too short for task {request.name!r}: the smallest sample takes {length} "
                f"tokens, {task.max_new_tokens} for the reply included; raise length"
            )
        units = max(fewest, units - step if units - step > fewest else units - max(1, (units - fewest) // 4))


def _search(task: Task, request: Request) -> int:
    """Find the largest number of units that fits, by doubling and then halving the range."""
    low = task.fewest(request)
    high = low + max(1, task.step(request))
    draft, length = _measure(task, request, high)
    while length <= request.length:
        low, high = high, high + 2 * (high - low)
        longer, length = _measure(task, request, high)
        if len(longer.context) <= len(draft.context):
            return low  # the data has no more to give
        draft = longer
    while high - low > 1:
        middle = (low + high) // 2
        if _measure(task, request, middle)[1] <= request.length:
            low = middle
        else:
            high = middle
    return low


def _measure(task: Task, request: Request, units: int) -> tuple[Draft, int]:
    """Return a draw of so many units, and its length with max_new_tokens."""
    draft = task.draw(request, units)
    ends = [q.question + q.answer_prefix for q in draft.questions]
    counter = request.counter
    if len(ends) == 1:
        tokens = counter.count(draft.context + ends[0], remember=False)
    else:
        tokens = counter.count(draft.context, remember=False) + max(counter.counts(ends, remember=False))
    return draft, tokens + request.length - request.room + task.max_new_tokens
