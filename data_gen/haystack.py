"""Haystacks: the text around the needles, in units whose token counts are known.

noise    one line of five short sentences, repeated (RULER)
needle   lines of needles that no question is about (RULER); the caller makes the lines
essay    consecutive sentences of natural text: the shipped Wikipedia paragraphs, or the user's own files
"""

import gzip
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic_core import from_json

from leank.data_gen.reading import digest, read_text
from leank.data_gen.tokens import TokenCounter

NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NOISE_LINE = " ".join(NOISE_SENTENCES)
SPLITS = ("train", "test", "all")
_LONGEST = 10_000  # letters of a word, of which a reply has dozens; a script without blanks makes paragraphs of one
_BLOCK = 64  # pieces of a text whose tokens are counted together
_TEST_SHARE = 10  # every tenth paragraph is kept for evaluation
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]”’]))\s+")

Units = tuple[list[str], int]  # units of text, and the tokens they take with their separators


@lru_cache
def words(kind: str) -> tuple[str, ...]:
    """Return a shipped word list: "nouns", "adjectives" or "verbs"."""
    return tuple((files("leank.data_gen") / "assets" / f"{kind}.txt").read_text(encoding="utf-8").split("\n")[:-1])


@lru_cache
def sentences(path: str | None, split: str) -> tuple[str, ...]:
    """Return the sentences of a text, in order.

    path: a .txt, .txt.gz or RULER .json ({"text": ...}), a folder of .txt files, or None for the shipped paragraphs.
    split: "train", "test" (every tenth paragraph) or "all".
    Raises FileNotFoundError if the path does not exist, ValueError for an empty text or an endless word.
    """
    parts = [split_sentences(p) for p in paragraphs(path, "all")]
    test = [s for p in parts[_TEST_SHARE - 1 :: _TEST_SHARE] for s in p]
    if split == "test":
        found = test
    elif split == "train":  # a sentence that is also in a test paragraph belongs to the test
        unseen = set(test)
        found = [s for i, p in enumerate(parts, 1) if i % _TEST_SHARE for s in p if s not in unseen]
    else:
        found = [s for p in parts for s in p]
    if not found:
        raise ValueError(f"essays={path!r} (split={split!r}) holds no sentences; give a longer text or split='all'")
    longest = max((word for sentence in found for word in sentence.split(" ")), key=len)
    if len(longest) > _LONGEST:
        raise ValueError(
            f"essays={path!r} holds a word of {len(longest):,} letters, {longest[:20]!r}...; put blanks between words"
        )
    return tuple(found)


def paragraphs(path: str | None, split: str) -> list[str]:
    """Return the paragraphs of a text, in order, with single blanks between words.

    path, split: see `sentences`; "train" has every paragraph but the test's, even those that share sentences with it.
    """
    found = [" ".join(p.split()) for p in _read(path).splitlines() if p.strip()]
    if split == "all":
        return found
    return [p for i, p in enumerate(found, 1) if (i % _TEST_SHARE == 0) == (split == "test")]


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; they end in . ! or ? with any closing quote or bracket, before white space."""
    return [s for s in _SENTENCE_END.split(text) if s]


@lru_cache(maxsize=8)
def _text_words(path: str | None, split: str) -> tuple[str, ...]:
    return tuple(" ".join(sentences(path, split)).split(" "))


@lru_cache(maxsize=8)
def known_by(path: str | None) -> str | None:
    """Return the digest of a text's contents; None for the shipped paragraphs. Raises as `sentences` does."""
    return None if path is None else digest(_read(path))


@lru_cache(maxsize=8)
def _read(path: str | None) -> str:
    if path is None:
        packed = (files("leank.data_gen") / "assets" / "wikipedia_paragraphs.txt.gz").read_bytes()
        return gzip.decompress(packed).decode("utf-8")
    source = Path(path)
    if source.is_dir():
        return "\n".join(read_text(f) for f in sorted(source.glob("*.txt")))
    if not source.is_file():
        raise FileNotFoundError(
            f"essays={path!r} does not exist; give a .txt, .txt.gz or RULER .json file, a folder of .txt files, "
            "or leave it out for the shipped text"
        )
    text = read_text(source)
    if ".json" not in source.suffixes:
        return text
    try:
        return "" + from_json(text)["text"]  # a TypeError for what is no text
    except (ValueError, LookupError, TypeError):
        raise ValueError(f'essays={path!r} is not RULER\'s form of essays; give JSON {{"text": "..."}}') from None


def take_noise(budget: int, counter: TokenCounter) -> Units:
    """Return noise lines of `budget` tokens; single sentences fill the last line."""
    line = counter.pieces([NOISE_LINE], "\n")[0]
    lines = [NOISE_LINE] * max(0, budget // line)
    rest, tokens = filler(budget - line * len(lines), counter)
    return [*lines, *rest], line * len(lines) + tokens


def filler(budget: int, counter: TokenCounter) -> Units:
    """Return one line of noise of at most `budget` tokens, cut at a word; no line if no word fits."""
    out: list[str] = []
    left = budget
    while left > 0:
        sentence = NOISE_SENTENCES[len(out) % len(NOISE_SENTENCES)]
        text, cost = cut(sentence, left, counter)
        out += [text] if text else []
        left -= cost
        if text != sentence:
            break
    return [" ".join(out)] if out else [], budget - left


def take_essay(budget: int, counter: TokenCounter, rng: random.Random, path: str | None, split: str) -> Units:
    """Return sentences of `budget` tokens from a random place on, in a circle; the last is cut at a word."""
    text = sentences(path, split)
    at = rng.randrange(len(text))
    out: list[str] = []
    left = budget
    while left > 0:
        block = [text[(at + i) % len(text)] for i in range(64)]
        costs = counter.pieces(block, " ")
        if not out:  # the first one follows a line end, not a blank
            costs[0] = max(costs[0], counter.count("\n" + block[0]) - counter.count("\n"))
        for sentence, cost in zip(block, costs, strict=True):
            if cost > left:
                start, tokens = cut(sentence, left, counter)
                return [*out, start] if start else out, budget - left + tokens
            out.append(sentence)
            left -= cost
        at += len(block)
    return out, budget - left


def cut(text: str, budget: int, counter: TokenCounter) -> tuple[str, int]:
    """Return the first words of a text that take at most `budget` tokens, and the tokens that they take."""
    pieces = text.split(" ")
    total = 0
    for n, cost in enumerate(counter.pieces(pieces, " ")):
        if total + cost > budget:
            return " ".join(pieces[:n]), total
        total += cost
    return text, total


def take_before(
    text: Sequence[str], end: int, budget: int, counter: TokenCounter, separator: str
) -> tuple[str, int]:  # fmt: skip
    """Return what stands before piece `end` of a text in `budget` tokens, and the tokens; it ends where it starts.

    separator: what stands between pieces, a blank or a line's end. The first piece is cut at a blank.
    """
    out: list[str] = []
    left = budget
    while left > 0:
        block = [text[(end - 1 - i) % len(text)] for i in range(_BLOCK)]
        for piece, cost in zip(block, counter.pieces(block, separator), strict=True):
            if cost > left:
                back, tokens = cut(" ".join(reversed(piece.split(" "))), left, counter)
                out += [" ".join(reversed(back.split(" ")))] if back else []
                return separator.join(reversed(out)), budget - left + tokens
            out.append(piece)
            left -= cost
        end -= _BLOCK
    return separator.join(reversed(out)), budget - left


def take_lines(budget: int, counter: TokenCounter, make_line: Callable[[], str]) -> Units:
    """Return lines from `make_line` of `budget` tokens; noise sentences fill the rest of a line."""
    out: list[str] = []
    left = budget
    size = 40  # first guess of the tokens per line; measured lines replace it
    while True:
        block = [make_line() for _ in range(max(1, left // size))]
        for line, cost in zip(block, counter.pieces(block, "\n", remember=False), strict=True):
            if cost > left:
                rest, tokens = filler(left, counter)
                return [*out, *rest], budget - left + tokens
            out.append(line)
            left -= cost
            size = max(1, cost)


def first_words(n: int, path: str | None, split: str) -> list[str]:
    """Return the first `n` words of a text as sentences; a shorter text is repeated (RULER's essay haystack)."""
    text = _text_words(path, split)
    repeated = text * (n // len(text)) + text[: n % len(text)]
    return split_sentences(" ".join(repeated))


def insert(units: Sequence[str], placed: Sequence[tuple[int, str]]) -> list[str]:
    """Insert each text before the unit at its place; texts at one place keep their order."""
    out: list[str] = []
    start = 0
    for place, text in sorted(placed, key=lambda item: item[0]):
        out += units[start:place]
        out.append(text)
        start = place
    return [*out, *units[start:]]


def random_places(units: int, n: int, rng: random.Random) -> list[int]:
    """Draw `n` sorted places among the units; if there are enough units, the places differ, as in RULER."""
    return sorted(rng.sample(range(units), n) if n <= units else [rng.randint(0, units) for _ in range(n)])
