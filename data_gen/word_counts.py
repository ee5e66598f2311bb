"""RULER aggregation tasks: common words extraction (cwe, 1-shot) and frequent words extraction (fwe)."""

from __future__ import annotations

import bisect
import random
import string
from dataclasses import dataclass
from itertools import accumulate

from data_gen import haystack
from data_gen.niah import _bos
from data_gen.sample import Document, Question
from data_gen.tokens import TokenCounter

CWE_HEADER = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE_HEADER = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True)
class CommonWords:
    """Ten words appear `common` times, the others `uncommon` times; name the ten.

    The example has 40 words (10 and 3 times). Below 4,096 tokens RULER shrinks both: 6 and 1 times,
    and an example of 20 words (3 and 1 times).
    """

    max_new_tokens: int = 120

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
        """One document with one question (the task has no second). Raises ValueError where `length` is too short."""
        rng = random.Random(f"{name}/{seed}/{index}")
        small = length < 4096
        common, uncommon = (6, 1) if small else (30, 3)
        vocabulary = list(dict.fromkeys(w for k in ("nouns", "adjectives", "verbs") for w in haystack.words(k)))
        rng.shuffle(vocabulary)
        example, shown = _word_list(vocabulary[: 20 if small else 40], *((3, 1) if small else (10, 3)), rng)
        pool = vocabulary[40:]
        shot = CWE_HEADER + example + CWE_QUESTION + CWE_PREFIX + " " + _numbered(shown) + "\n"
        fixed = counter.count(shot + CWE_HEADER + CWE_QUESTION + CWE_PREFIX) + _bos(counter)
        target_cost = counter.count(" " + _numbered(pool[:10]))
        budget = length - fixed - (target_cost if exact else self.max_new_tokens)
        costs = [c + 4 for c in counter.counts([" " + w for w in pool])]  # "123." takes up to four tokens more
        totals = list(accumulate(c * (common if i < 10 else uncommon) for i, c in enumerate(costs)))
        n = bisect.bisect_right(totals, budget)
        if n < 10:
            raise ValueError(f"length={length} is too short for task {name!r}: ten words do not fit; raise length")
        text, answers = _word_list(pool[:n], common, uncommon, rng)
        while n > 10 and counter.count(text) > budget:  # the estimate errs on the safe side; this is rare
            n -= max(1, n // 50)
            text, answers = _word_list(pool[:n], common, uncommon, rng)
        question = Question(CWE_QUESTION, CWE_PREFIX, tuple(answers), " " + _numbered(answers))
        context = shot + CWE_HEADER + text
        total = counter.count(context) + counter.count(CWE_QUESTION + CWE_PREFIX) + _bos(counter)
        return Document(name, seed, index, context, (question,), self.max_new_tokens, total)


@dataclass(frozen=True)
class FrequentWords:
    """Coded words drawn from a zeta distribution; the most frequent is written "..."; name the next three."""

    alpha: float = 2.0
    word_length: int = 6
    max_new_tokens: int = 50

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
        """One document with one question (the task has no second). Raises ValueError where `length` is too short."""
        rng = random.Random(f"{name}/{seed}/{index}")
        size = (length - self.max_new_tokens) // 50
        fixed = counter.count(FWE_HEADER + FWE_QUESTION + FWE_PREFIX) + self.max_new_tokens + _bos(counter)
        if size < 5 or fixed >= length:
            raise ValueError(
                f"length={length} is too short for task {name!r}: its vocabulary has {size} words; raise length"
            )
        names: dict[str, None] = {"...": None}
        while len(names) < size:
            names["".join(rng.choices(string.ascii_lowercase, k=self.word_length))] = None
        vocabulary = list(names)
        weights = [1 / (rank**self.alpha) for rank in range(1, size + 1)]
        costs = counter.counts([" " + w for w in vocabulary])
        expected = sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights)
        drawn = rng.choices(range(size), weights=weights, k=int(1.2 * (length - fixed) / expected) + 8)
        totals = list(accumulate(costs[i] for i in drawn))
        drawn = drawn[: bisect.bisect_right(totals, length - fixed)]
        seen: dict[int, int] = {}
        for i in drawn:
            seen[i] = seen.get(i, 0) + 1
        top = sorted((i for i in seen if i), key=lambda i: (-seen[i], i))[:3]
        answers = [vocabulary[i] for i in top]
        question = Question(FWE_QUESTION, FWE_PREFIX, tuple(answers), " " + ", ".join(answers))
        context = FWE_HEADER + " ".join(vocabulary[i] for i in drawn)
        return Document(name, seed, index, context, (question,), self.max_new_tokens, fixed + totals[len(drawn) - 1])


def _word_list(words: list[str], common: int, uncommon: int, rng: random.Random) -> tuple[str, list[str]]:
    """A shuffled numbered list in which the first ten words recur `common` times; and those ten."""
    drawn = words[:10] * common + words[10:] * uncommon
    rng.shuffle(drawn)
    return _numbered(drawn), words[:10]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {w}" for i, w in enumerate(words, 1))
