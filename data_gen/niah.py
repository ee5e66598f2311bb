"""Needles in a haystack, in RULER's wording: single, multi-key, multi-value and multi-query retrieval.

LeanK's two training tasks (section 3.1) are members of the same family: dense retrieval is a haystack made of
uuid -> uuid needles, multi-value retrieval asks for every value of a key that has several.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from data_gen import haystack
from data_gen.sample import Document, Question
from data_gen.tokens import TokenCounter

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
DEPTHS = tuple(100 * i / 39 for i in range(40))  # RULER: 40 depths in per cent, evenly spaced


@dataclass(frozen=True)
class Niah:
    """One member of the family.

    haystack: "noise", "essay" or "needle". key_type, value_type: "words", "numbers" or "uuids".
    num_keys: needles with different keys (the queried ones included). num_values: values a key.
    num_queries: keys a question asks for. max_new_tokens: room for the reply.
    needle, prefix: the wording; RULER's by default.
    """

    haystack: str = "noise"
    key_type: str = "words"
    value_type: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    max_new_tokens: int = 128
    needle: str = NEEDLE
    header: str | None = None
    question: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.haystack not in ("noise", "essay", "needle"):
            raise ValueError(f"haystack={self.haystack!r} is unknown; choose noise, essay or needle")
        for kind in (self.key_type, self.value_type):
            if kind not in _MAKERS:
                raise ValueError(f"key_type/value_type={kind!r} is unknown; choose {', '.join(_MAKERS)}")

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
        """One document of `length` tokens with `questions` questions about different keys.

        exact: fill up to `length`, answer included; otherwise whole units only, and prompt + max_new_tokens stay
            within `length` (how RULER sizes its samples).

        Raises ValueError where the needles alone are longer than `length`.
        """
        rng = random.Random(f"{name}/{seed}/{index}")
        asked_keys = _distinct(self.key_type, max(self.num_keys, self.num_queries * questions), rng)
        values = {key: _distinct(self.value_type, self.num_values, rng) for key in asked_keys}
        one = self.num_queries * self.num_values == 1
        kind = self.value_type[:-1] if one else self.value_type
        needles = [(key, self._needle(key, value)) for key in asked_keys for value in values[key]]
        rng.shuffle(needles)

        header = self.header if self.header is not None else (HEADER_ONE if one else HEADER)
        header = header.format(kind=kind)
        queried = [asked_keys[i * self.num_queries : (i + 1) * self.num_queries] for i in range(questions)]
        order = {needle: place for place, (_, needle) in enumerate(needles)}
        asked = []
        for keys in queried:
            answers = [
                value
                for key in keys  # values of one key in the order in which a reader meets them
                for value in sorted(values[key], key=lambda v, k=key: order[self._needle(k, v)])  # type: ignore[misc]
            ]
            asked.append(self._ask(keys, answers, one, kind))

        separator = " " if self.haystack == "essay" else "\n"
        tail = max(counter.counts([q.question + q.answer_prefix + q.target for q in asked], remember=False))
        if not exact:
            prompts = counter.counts([q.question + q.answer_prefix for q in asked], remember=False)
            tail = max(prompts) + self.max_new_tokens
        separated = "{1}{0}" if separator == " " else "{0}{1}"  # a space belongs to the word that follows it
        needle_tokens = sum(counter.counts([separated.format(n, separator) for _, n in needles], remember=False))
        fixed = counter.count(header) + needle_tokens + tail + _bos(counter)
        if fixed > length:
            raise ValueError(
                f"length={length} is too short for task {name!r}: its needles, question and answer alone take "
                f"{fixed} tokens; raise length or lower questions={questions}"
            )
        units = self._units(length - fixed, counter, rng, exact, essays, split)
        body = separator.join(_insert(units, [n for _, n in needles], rng, by_depth=self.haystack == "essay"))
        total = (
            length
            if exact
            else fixed + sum(counter.counts([separated.format(u, separator) for u in units], remember=False))
        )
        return Document(name, seed, index, header + body, tuple(asked), self.max_new_tokens, total)

    def _needle(self, key: str, value: str) -> str:
        return self.needle.format(kind=self.value_type, key=key, value=value)

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

    def _units(
        self, budget: int, counter: TokenCounter, rng: random.Random, exact: bool, essays: str | None, split: str
    ) -> list[str]:
        if self.haystack == "noise":
            return haystack.take_noise(budget, counter, exact)
        if self.haystack == "essay":
            return haystack.take_essay(budget, counter, rng, essays, split, exact)
        make_key, make_value = _MAKERS[self.key_type], _MAKERS[self.value_type]
        return haystack.take_lines(budget, counter, lambda: self._needle(make_key(rng), make_value(rng)), exact)


def join(items: list[str]) -> str:
    """RULER's list form: "a", "a, and b", "a, b, and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def _insert(units: list[str], needles: list[str], rng: random.Random, by_depth: bool) -> list[str]:
    """Needles among the units: at distinct RULER depths (essay) or at random lines (noise, needle)."""
    if by_depth:
        depths = rng.sample(DEPTHS, len(needles)) if len(needles) <= len(DEPTHS) else None
        places = (
            [int(len(units) * d / 100) for d in sorted(depths)]
            if depths is not None
            else sorted(rng.randint(0, len(units)) for _ in needles)
        )
    else:
        places = sorted(rng.randint(0, len(units)) for _ in needles)
    out: list[str] = []
    start = 0
    for place, needle in zip(places, needles, strict=True):
        out += units[start:place]
        out.append(needle)
        start = place
    return out + units[start:]


def _word(rng: random.Random) -> str:
    return f"{rng.choice(haystack.words('adjectives'))}-{rng.choice(haystack.words('nouns'))}"


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_MAKERS: dict[str, Callable[[random.Random], str]] = {"words": _word, "numbers": _number, "uuids": _uuid}


def _distinct(kind: str, n: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[_MAKERS[kind](rng)] = None
    return list(found)


def _bos(counter: TokenCounter) -> int:
    """Special tokens that the tokenizer puts around a prompt."""
    return counter.tokenizer.num_special_tokens_to_add(pair=False)
