"""Passkey retrieval after DuoAttention (LeanK Appendix K): long word sequences hidden in text, asked for by ordinal."""

import random
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from leank.data_gen import haystack
from leank.data_gen.task import Filler, LaidOut, Layout, Question, Request
from leank.typed import Positive

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
HEADER = "Several vault passkeys are hidden within the following text. Memorize every one of them.\n"
NEEDLE = "Keep in mind this sequence of words, the {ordinal} passkey to the vault: {words}."
QUESTION = "\nAccording to the text, what is the {ordinal} passkey to the vault?"
PREFIX = " The {ordinal} passkey to the vault is:"


@dataclass(frozen=True)
class Passkey(LaidOut):
    """Passkeys at depths between 5% and 95% of natural text, one of which a question asks for."""

    num_passkeys: Annotated[int, Ge(1), Le(len(ORDINALS))] = 10  # passkeys in the text, and the most questions about it
    num_words: Positive = 32  # words per passkey
    max_new_tokens: Positive = 128  # room for the reply

    def layout(self, request: Request, rng: random.Random) -> Layout:
        """See `LaidOut.layout`; a unit of filler is a word of the essays."""
        keys = [" ".join(rng.choices(haystack.words("nouns"), k=self.num_words)) for _ in range(self.num_passkeys)]
        numbered = list(zip(ORDINALS, keys, strict=False))
        asked = tuple(
            Question(QUESTION.format(ordinal=o), PREFIX.format(ordinal=o), (k,), f" {k}.")
            for o, k in rng.sample(numbered, min(request.questions, self.num_passkeys))
        )
        needles = [NEEDLE.format(ordinal=o, words=k) for o, k in numbered]

        def arrange(units: list[str]) -> list[str]:
            low, high = int(0.05 * len(units)), int(0.95 * len(units))
            return haystack.insert(units, [(rng.randint(low, high), needle) for needle in needles])

        return Layout(HEADER, needles, asked, Filler.essay(request, rng), arrange, " ")
