"""RULER aggregation tasks: common words extraction (cwe, 1-shot) and frequent words extraction (fwe)."""

import bisect
import math
import random
import string
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from leank.data_gen import haystack
from leank.data_gen.reading import read_text
from leank.data_gen.task import SHORT, Draft, Question, Request, Task

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
_COMMON = 10
_DOTS = "..."
_LETTERS = 6  # of a coded word
_ZETA = math.pi**2 / 6  # zeta(2), Riemann's


@dataclass(frozen=True)
class CommonWords(Task):
    """Ten words appear 30 times and all others 3 times; the one question asks for the ten.

    The example has 40 words, which appear 10 and 3 times. Below `SHORT` tokens words appear 6 times and once, and the
    example has 20 words, which appear 3 times and once, as in RULER.
    """

    max_new_tokens: int = 120  # room for the reply

    def fill(self, request: Request) -> Draft:
        rng = request.rng()
        words = self._words(request, rng)
        shot = self._shot(request, words, rng)
        counter = request.counter
        answer = counter.count(" " + numbered(words[:_COMMON]), remember=False)
        fixed = counter.count(shot + CWE_HEADER, remember=False) + counter.count(CWE_QUESTION + CWE_PREFIX) + answer
        budget = request.left(fixed)
        common, uncommon, *_ = self._frequencies(request)
        costs = counter.pieces(words, " ")
        totals = [*accumulate((c * (common if i < _COMMON else uncommon) for i, c in enumerate(costs)), initial=0)]
        entries = range(1, _entries(len(words), common, uncommon) + 1)
        numbers = [*accumulate(counter.pieces([f"{i}." for i in entries], " "), initial=0)]  # of the first 0, 1, .. n
        sizes = [totals[n] + numbers[_entries(n, common, uncommon)] for n in range(_COMMON, len(words) + 1)]
        n = _COMMON - 1 + bisect.bisect_right(sizes, budget)
        if n < _COMMON:
            request.left(fixed + sizes[0])
        if n == len(words) and sizes[-1] < 0.98 * budget:
            raise _too_few_words(request, len(words))
        context = shot + CWE_HEADER + self._list(words[:n], common, uncommon, rng)
        return Draft(context, (_ask_common(words),), fixed + sizes[n - _COMMON])

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; a unit is a distinct word."""
        rng = request.rng()
        words = self._words(request, rng)
        if units > len(words) and request.index >= 0:
            raise _too_few_words(request, len(words))
        shot = self._shot(request, words, rng)
        common, uncommon, *_ = self._frequencies(request)
        context = shot + CWE_HEADER + self._list(words[:units], common, uncommon, rng)
        return Draft(context, (_ask_common(words),))

    def fewest(self, request: Request) -> int:
        """Return the ten common words."""
        return _COMMON

    def _frequencies(self, request: Request) -> tuple[int, int, int, int, int]:
        """Return how often common and uncommon words appear, then the example's words and how often they appear."""
        return (6, 1, 20, 3, 1) if request.length < SHORT else (30, 3, 40, 10, 3)

    @staticmethod
    def _words(request: Request, rng: random.Random) -> list[str]:
        """Return all words in the document's own order; the first ten are the common ones."""
        words = list(vocabulary(request.data))
        rng.shuffle(words)
        return words

    def _shot(self, request: Request, words: list[str], rng: random.Random) -> str:
        _, _, n, common, uncommon = self._frequencies(request)
        example = words[-n:]  # from the end: the list itself takes words from the beginning
        text = self._list(example, common, uncommon, rng)
        return CWE_HEADER + text + CWE_QUESTION + CWE_PREFIX + " " + numbered(example[:_COMMON]) + "\n"

    @staticmethod
    def _list(words: list[str], common: int, uncommon: int, rng: random.Random) -> str:
        entries = words[:_COMMON] * common + words[_COMMON:] * uncommon
        rng.shuffle(entries)
        return numbered(entries)


@lru_cache(maxsize=4)
def vocabulary(path: str | None) -> tuple[str, ...]:
    """Return the distinct words of cwe: the shipped 8,169, then those of a file. Raises FileNotFoundError."""
    found = dict.fromkeys(w for kind in ("nouns", "adjectives", "verbs") for w in haystack.words(kind))
    if path is not None:
        source = Path(path)
        if not source.is_file():
            raise FileNotFoundError(
                f"data={path!r} does not exist; give a word list (.txt or .txt.gz, one word a line), "
                "or leave it out for the 8,169 shipped words"
            )
        found |= dict.fromkeys(w.strip() for w in read_text(source).splitlines() if w.strip())
    return tuple(found)


def numbered(words: list[str]) -> str:
    """Number the words: "1. a 2. b", and so on."""
    return " ".join(f"{i}. {w}" for i, w in enumerate(words, 1))


def _entries(words: int, common: int, uncommon: int) -> int:
    return common * _COMMON + uncommon * (words - _COMMON)


def _ask_common(words: list[str]) -> Question:
    answers = words[:_COMMON]
    return Question(CWE_QUESTION, CWE_PREFIX, tuple(answers), " " + numbered(answers))


def _too_few_words(request: Request, n: int) -> ValueError:
    return ValueError(
        f"length={request.length} needs more than the {n:,} distinct words there are (data={request.data!r}); "
        "give data= a longer word list, one word a line, or lower length"
    )


@dataclass(frozen=True)
class FrequentWords(Task):
    """Coded words whose counts follow a zeta distribution; the one question asks for the ranks 2 to 4.

    The word of rank k of n appears n / (k^2 zeta(2)) times, rounded down. The most frequent word is "...".
    """

    max_new_tokens: int = 50  # room for the reply

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`; dots fill the tokens that the distribution leaves."""
        rng = request.rng()
        words = self._vocabulary(request, rng)
        counter = request.counter
        fixed = counter.count(FWE_HEADER.rstrip()) + request.tail([_ask_frequent(words)])
        budget = request.left(fixed)
        costs = counter.pieces(words, " ", remember=False)

        def size(total: int) -> int:
            return sum(n * c for n, c in zip(_counts(total, len(words)), costs, strict=True))

        total = bisect.bisect_right(range(2 * budget + 1), budget, key=size) - 1
        counts = _counts(total, len(words))
        if len(counts) < 4 or counts[2] == counts[3] or not counts[3]:
            raise ValueError(
                f"length={request.length} is too short for task {request.name!r}: the words of the first ranks do not "
                "differ in their counts; raise length"
            )
        dots = (budget - size(total)) // costs[0]
        counts[0] += dots
        context = self._text(words, counts, rng)
        return Draft(context, (_ask_frequent(words),), fixed + size(total) + dots * costs[0])

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; 0 units are RULER's first guess of the number of words, each unit adds one of its steps."""
        rng = request.rng()
        words = self._vocabulary(request, rng)
        counts = _counts(self._total(request, units), len(words))
        return Draft(self._text(words, counts, rng), (_ask_frequent(words),))

    def step(self, request: Request) -> int:
        """Return one unit, which is 1/32 of the length in words."""
        return 1

    def fewest(self, request: Request) -> int:
        """Return the fewest units (0 or below) with which the ranks 3 and 4 differ in their counts."""
        units = 0
        while True:
            counts = _counts(self._total(request, units - 1), 4)
            if not counts[3] or counts[2] == counts[3]:
                return units
            units -= 1

    def _total(self, request: Request, units: int) -> int:
        free = request.length - self.max_new_tokens
        return max(0, free // _LETTERS + units * max(1, free // 32))

    def _vocabulary(self, request: Request, rng: random.Random) -> list[str]:
        size = (request.length - self.max_new_tokens) // 50
        if size < 5:
            raise ValueError(
                f"length={request.length} is too short for task {request.name!r}: its vocabulary would have {size} "
                f"words; raise length to {5 * 50 + self.max_new_tokens} or more"
            )
        names: dict[str, None] = {_DOTS: None}
        while len(names) < size:
            names["".join(rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
        return list(names)

    @staticmethod
    def _text(words: list[str], counts: list[int], rng: random.Random) -> str:
        text = [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
        rng.shuffle(text)
        return FWE_HEADER + " ".join(text)


def _counts(total: int, words: int) -> list[int]:
    """Return how often each rank appears among `total` words."""
    return [int(total * rank**-2.0 / _ZETA) for rank in range(1, words + 1)]


def _ask_frequent(words: list[str]) -> Question:
    answers = words[1:4]
    return Question(FWE_QUESTION, FWE_PREFIX, tuple(answers), " " + ", ".join(answers))
