"""Haystacks: the text around the needles, taken in units whose token counts are known.

noise    one line of five short sentences, repeated (RULER)
needle   lines of needles nobody asks for (RULER); the caller makes the lines
essay    consecutive sentences of natural text: the shipped Wikipedia paragraphs, or files of the user's own
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from data_gen.tokens import TokenCounter

NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NOISE_LINE = " ".join(NOISE_SENTENCES)
SPLITS = ("train", "test", "all")
_TEST_SHARE = 10  # every tenth paragraph is kept for evaluation


@lru_cache
def words(kind: str) -> tuple[str, ...]:
    """A shipped word list: "nouns", "adjectives" or "verbs"."""
    return tuple((files("data_gen") / "assets" / f"{kind}.txt").read_text(encoding="utf-8").split("\n")[:-1])


@lru_cache
def sentences(path: str | None, split: str) -> tuple[str, ...]:
    """Sentences of a text, in order.

    path: None for the shipped paragraphs; else a .txt, .txt.gz or RULER essay .json ({"text": ...}) file,
        or a folder of .txt files.
    split: "train", "test" (every tenth paragraph) or "all".

    Raises FileNotFoundError where the path does not exist, ValueError for an unknown split or an empty text.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}")
    paragraphs = [p for p in _read(path).splitlines() if p.strip()]
    if split != "all":
        paragraphs = [p for i, p in enumerate(paragraphs) if (i % _TEST_SHARE == _TEST_SHARE - 1) == (split == "test")]
    found = [s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", p.strip()) if s]
    if not found:
        raise ValueError(f"essays={path!r} (split={split!r}) holds no sentences; give a longer text or split='all'")
    return tuple(found)


def _read(path: str | None) -> str:
    if path is None:
        packed = (files("data_gen") / "assets" / "wikipedia_paragraphs.txt.gz").read_bytes()
        return gzip.decompress(packed).decode("utf-8")
    source = Path(path)
    if source.is_dir():
        return "\n".join(f.read_text(encoding="utf-8") for f in sorted(source.glob("*.txt")))
    if not source.exists():
        raise FileNotFoundError(
            f"essays={path!r} does not exist; give a .txt, .txt.gz or RULER .json file, "
            "or leave it null for the shipped text"
        )
    text = gzip.decompress(source.read_bytes()).decode("utf-8") if source.suffix == ".gz" else source.read_text("utf-8")
    return json.loads(text)["text"] if ".json" in source.suffixes else text


def take_noise(budget: int, counter: TokenCounter, exact: bool) -> list[str]:
    """Noise lines of at most `budget` tokens; `exact` fills the rest with single sentences."""
    line = counter.count(NOISE_LINE + "\n")
    lines = [NOISE_LINE] * max(0, budget // line)
    if exact:
        rest = filler(budget - line * len(lines), counter)
        lines += [rest] if rest else []
    return lines


def filler(budget: int, counter: TokenCounter) -> str:
    """Noise sentences of about `budget` tokens (to within half a sentence), for what whole units leave over."""
    out: list[str] = []
    left = budget
    while True:
        sentence = NOISE_SENTENCES[len(out) % len(NOISE_SENTENCES)]
        cost = counter.count(" " + sentence)
        if left < cost / 2:
            return " ".join(out)
        out.append(sentence)
        left -= cost


def take_essay(
    budget: int, counter: TokenCounter, rng: random.Random, path: str | None, split: str, exact: bool
) -> list[str]:
    """Consecutive sentences from a random place (wrapping round) of at most `budget` tokens.

    `exact` cuts the last sentence between two words so that the budget is met.
    """
    text = sentences(path, split)
    at = rng.randrange(len(text))
    out: list[str] = []
    left = budget
    while left > 0:
        block = [text[(at + i) % len(text)] for i in range(64)]
        for sentence, cost in zip(block, counter.counts([" " + s for s in block]), strict=True):
            if cost > left:
                cut = _cut(sentence, left, counter) if exact else ""
                return [*out, cut] if cut else out
            out.append(sentence)
            left -= cost
        at += len(block)
    return out


def _cut(sentence: str, budget: int, counter: TokenCounter) -> str:
    pieces = sentence.split(" ")
    total = 0
    for n, cost in enumerate(counter.counts([" " + p for p in pieces])):
        total += cost
        if total > budget:
            return " ".join(pieces[:n])
    return sentence


def take_lines(budget: int, counter: TokenCounter, make_line: Callable[[], str], exact: bool) -> list[str]:
    """Lines from `make_line` of at most `budget` tokens; `exact` ends with noise sentences for the rest."""
    out: list[str] = []
    left = budget
    size = 40  # first guess of tokens a line; replaced by what the lines measure
    while True:
        block = [make_line() for _ in range(max(1, left // size))]
        for line, cost in zip(block, counter.counts([s + "\n" for s in block], remember=False), strict=True):
            if cost > left:
                rest = filler(left, counter) if exact else ""
                return [*out, rest] if rest else out
            out.append(line)
            left -= cost
            size = cost
