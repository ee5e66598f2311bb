"""Passkey retrieval after DuoAttention (LeanK Appendix K): long word sequences hidden in text, asked for by ordinal."""

from __future__ import annotations

import random
from dataclasses import dataclass

from leank.data_gen import haystack
from leank.data_gen.amount import amount
from leank.data_gen.request import Draft, Request
from leank.data_gen.sample import Question
from leank.data_gen.task import Task

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
HEADER = "Several vault passkeys are hidden within the following text. Memorize every one of them.\n"
NEEDLE = "Keep in mind this sequence of words, the {ordinal} passkey to the vault: {words}."
QUESTION = "\nAccording to the text, what is the {ordinal} passkey to the vault?"
PREFIX = " The {ordinal} passkey to the vault is:"


@dataclass(frozen=True)
class Passkey(Task):
    """Passkeys at depths between 5% and 95%, one of which a question asks for.

    haystack: "noise" or "essay".
    num_passkeys: passkeys in the text, and the most questions about it.
    num_words: words per passkey.
    max_new_tokens: room for the reply.

    Raises ValueError for an unknown haystack or a number out of range.
    """

    haystack: str = "essay"
    num_passkeys: int = 10
    num_words: int = 32
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.num_passkeys <= len(ORDINALS):
            raise ValueError(f"num_passkeys={self.num_passkeys} is out of range; choose 1 to {len(ORDINALS)}")
        if self.num_words < 1:
            raise ValueError(f"num_words={self.num_words} must be at least 1")
        if self.haystack not in ("noise", "essay"):
            raise ValueError(f"haystack={self.haystack!r} is unknown to the passkey task; choose noise or essay")

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`."""
        rng = request.rng()
        needles, asked = self._contents(request, rng)
        counter = request.counter
        fixed = counter.count(HEADER) + request.tail(asked)
        fixed += sum(counter.pieces(needles, self._separator, remember=False))
        holds = f"{amount(self.num_passkeys, 'passkey')} of {amount(self.num_words, 'word')}, question and answer"
        budget = request.left(fixed, holds, "num_passkeys, num_words")
        if self.haystack == "noise":
            units, tokens = haystack.take_noise(budget, counter)
        else:
            units, tokens = haystack.take_essay(budget, counter, rng, request.essays, request.split)
        return Draft(self._hide(needles, units, rng), asked, fixed + tokens)

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; a unit is a noise line, or a word of the essays from their beginning."""
        rng = request.rng()
        needles, asked = self._contents(request, rng)
        if self.haystack == "noise":
            text = [haystack.NOISE_LINE] * units
        else:
            text = haystack.first_words(units, request.essays, request.split)
        return Draft(self._hide(needles, text, rng), asked)

    def step(self, request: Request) -> int:
        """Return one unit; RULER has no such task."""
        return 1

    @property
    def _separator(self) -> str:
        return " " if self.haystack == "essay" else "\n"

    def _contents(self, request: Request, rng: random.Random) -> tuple[list[str], tuple[Question, ...]]:
        keys = [" ".join(rng.choices(haystack.words("nouns"), k=self.num_words)) for _ in range(self.num_passkeys)]
        numbered = list(zip(ORDINALS, keys, strict=False))
        asked = tuple(
            Question(QUESTION.format(ordinal=o), PREFIX.format(ordinal=o), (k,), f" {k}.")
            for o, k in rng.sample(numbered, min(request.questions, self.num_passkeys))
        )
        return [NEEDLE.format(ordinal=o, words=k) for o, k in numbered], asked

    def _hide(self, needles: list[str], units: list[str], rng: random.Random) -> str:
        low, high = int(0.05 * len(units)), int(0.95 * len(units))
        placed = [(rng.randint(low, high), needle) for needle in needles]
        return HEADER + self._separator.join(haystack.insert(units, placed))
