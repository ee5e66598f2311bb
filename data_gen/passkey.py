"""Passkey retrieval after DuoAttention (LeanK Appendix K): long word sequences hidden in text, asked for by ordinal."""

from __future__ import annotations

import random
from dataclasses import dataclass

from data_gen import haystack
from data_gen.niah import _bos
from data_gen.sample import Document, Question
from data_gen.tokens import TokenCounter

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
HEADER = "Several vault passkeys are hidden within the following text. Memorize every one of them.\n"
NEEDLE = "Keep in mind this sequence of words, the {ordinal} passkey to the vault: {words}."
QUESTION = "\nAccording to the text, what is the {ordinal} passkey to the vault?"
PREFIX = " The {ordinal} passkey to the vault is:"


@dataclass(frozen=True)
class Passkey:
    """num_passkeys sequences of num_words words each, at depths between 5% and 95%."""

    haystack: str = "essay"
    num_passkeys: int = 10
    num_words: int = 32
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.num_passkeys <= len(ORDINALS):
            raise ValueError(f"num_passkeys={self.num_passkeys} is out of range; choose 1 to {len(ORDINALS)}")
        if self.haystack not in ("noise", "essay"):
            raise ValueError(f"haystack={self.haystack!r} is unknown to the passkey task; choose noise or essay")

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
        """One document; `questions` is capped by num_passkeys. Raises ValueError where `length` is too short."""
        rng = random.Random(f"{name}/{seed}/{index}")
        keys = [" ".join(rng.choices(haystack.words("nouns"), k=self.num_words)) for _ in range(self.num_passkeys)]
        needles = [NEEDLE.format(ordinal=o, words=k) for o, k in zip(ORDINALS, keys, strict=False)]
        asked = [
            Question(QUESTION.format(ordinal=o), PREFIX.format(ordinal=o), (k,), f" {k}.")
            for o, k in rng.sample(list(zip(ORDINALS, keys, strict=False)), min(questions, self.num_passkeys))
        ]
        tails = counter.counts(
            [q.question + q.answer_prefix + (q.target if exact else "") for q in asked], remember=False
        )
        separator = " " if self.haystack == "essay" else "\n"
        fixed = counter.count(HEADER) + max(tails) + (0 if exact else self.max_new_tokens) + _bos(counter)
        fixed += sum(counter.counts([separator + n for n in needles], remember=False))
        if fixed > length:
            raise ValueError(
                f"length={length} is too short for task {name!r}: its {self.num_passkeys} passkeys of {self.num_words} "
                f"words take {fixed} tokens with question and answer; raise length or lower num_passkeys, num_words"
            )
        if self.haystack == "noise":
            units = haystack.take_noise(length - fixed, counter, exact)
        else:
            units = haystack.take_essay(length - fixed, counter, rng, essays, split, exact)
        low, high = int(0.05 * len(units)), int(0.95 * len(units))
        places = sorted((rng.randint(low, high), i) for i in range(len(needles)))
        for shift, (place, i) in enumerate(places):
            units.insert(place + shift, needles[i])
        context = HEADER + separator.join(units)
        total = length if exact else counter.count(context) + max(tails) + self.max_new_tokens + _bos(counter)
        return Document(name, seed, index, context, tuple(asked), self.max_new_tokens, total)
