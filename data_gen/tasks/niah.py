"""Needles in a haystack, in RULER's wording: single, multi-key, multi-value and multi-query retrieval.

LeanK's two training tasks (section 3.1) belong to the same family. Dense retrieval has a haystack of uuid -> uuid
needles. Multi-value retrieval asks for every value of a key that has several.
"""

import random
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Annotated

from leank.data_gen import haystack
from leank.data_gen.task import Filler, LaidOut, Layout, Question, Request
from leank.typed import OneOf, Positive

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
HEADER = (
    "Some special magic {kind} are hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
)
HEADER_ONE = (
    "A special magic {kind} is hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {key} mentioned in the provided text?"
QUESTION_ONE = "\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {key} mentioned in the provided text are"
PREFIX_ONE = " The special magic {kind} for {key} mentioned in the provided text is"
Kind = Annotated[str, OneOf("words", "numbers", "uuids")]  # of keys and of values
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # RULER: 40 depths in per cent


@dataclass(frozen=True)
class Niah(LaidOut):
    """One member of the family."""

    haystack: Annotated[str, OneOf("noise", "essay", "needle")] = "noise"
    key_type: Kind = "words"
    value_type: Kind = "numbers"
    num_keys: Positive = 1  # needles with different keys, the queried ones included
    num_values: Positive = 1  # values per key
    num_queries: Positive = 1  # keys that a question asks for
    max_new_tokens: Positive = 128  # room for the reply
    needle: str = NEEDLE  # needle, header, question, prefix: the wording; None is RULER's
    header: str | None = None
    question: str | None = None
    prefix: str | None = None

    def step(self, request: Request) -> int:
        """Return 500 words, or 25 lines."""
        return 500 if self.haystack == "essay" else 25

    def layout(self, request: Request, rng: random.Random) -> Layout:
        """See `LaidOut.layout`; a unit of filler is a line, or a word of the essays."""
        keys = _distinct(self.key_type, max(self.num_keys, self.num_queries * request.questions), rng)
        values = _distinct(self.value_type, len(keys) * self.num_values, rng)
        pairs = [(key, value) for i, value in enumerate(values) for key in [keys[i // self.num_values]]]
        rng.shuffle(pairs)  # into the order of the text
        one = self.num_queries * self.num_values == 1
        kind = self.value_type[:-1] if one else self.value_type
        header = self.header if self.header is not None else (HEADER_ONE if one else HEADER)
        asked = []
        for i in range(request.questions):
            queried = keys[i * self.num_queries : (i + 1) * self.num_queries]
            answers = [value for key in queried for k, value in pairs if k == key]
            asked.append(self._ask(queried, answers, one, kind))
        needles = [self._needle(key, value) for key, value in pairs]
        taken = frozenset(keys)
        if self.haystack == "noise":
            filler = Filler.noise(request)
        elif self.haystack == "essay":
            filler = Filler.essay(request, rng)
        else:
            filler = Filler.lines(request, lambda: self._distractor(taken, rng))
        return Layout(
            header.format(kind=kind), needles, tuple(asked), filler, lambda units: self._hide(needles, units, rng),
            " " if self.haystack == "essay" else "\n",
        )  # fmt: skip

    def _needle(self, key: str, value: str) -> str:
        return self.needle.format(kind=self.value_type, key=key, value=value)

    def _distractor(self, taken: Container[str], rng: random.Random) -> str:
        key = _MAKERS[self.key_type](rng)
        while key in taken:
            key = _MAKERS[self.key_type](rng)
        return self._needle(key, _MAKERS[self.value_type](rng))

    def _ask(self, keys: list[str], answers: list[str], one: bool, kind: str) -> Question:
        question = self.question if self.question is not None else (QUESTION_ONE if one else QUESTION)
        prefix = self.prefix if self.prefix is not None else (PREFIX_ONE if one else PREFIX)
        query = join(keys)
        return Question(
            question=question.format(kind=kind, key=query),
            answer_prefix=prefix.format(kind=kind, key=query),
            answers=tuple(answers),
            target=f" {join(answers)}.",
        )

    def _hide(self, needles: list[str], units: list[str], rng: random.Random) -> list[str]:
        """Hide the needles at distinct RULER depths of an essay, or between random lines."""
        n = len(needles)
        if self.haystack == "essay" and n <= len(DEPTHS):
            places = [len(units) * depth // 100 for depth in sorted(rng.sample(DEPTHS, n))]
        else:
            places = haystack.random_places(len(units), n, rng)
        return haystack.insert(units, list(zip(places, needles, strict=True)))


def join(items: list[str]) -> str:
    """Join items in RULER's form: "a", "a, and b", "a, b, and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{rng.choice(haystack.words('adjectives'))}-{rng.choice(haystack.words('nouns'))}",
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def _distinct(kind: str, n: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[_MAKERS[kind](rng)] = None
    return list(found)
