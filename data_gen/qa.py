"""RULER question answering: the documents of a question among others of the same data set (SQuAD, HotpotQA).

The data is not shipped. Download the official file and give its path:
    qa_1  https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json
    qa_2  http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from data_gen import haystack
from data_gen.request import Draft, Request
from data_gen.sample import Question
from data_gen.task import Task

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
HEADER = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n"
QUESTION = f"\n\n{_INSTRUCTION}\n\nQuestion: {{question}}"
PREFIX = " Answer:"
DOCUMENT = "Document {number}:\n{text}"
FILES = {"squad": "SQuAD's dev-v2.0.json", "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json"}


@dataclass(frozen=True)
class Asked:
    """A question of the data set. gold: its documents; related: others of the same article (SQuAD); both indices."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """One question of `dataset` ("squad", "hotpotqa") with its documents among others; `Request.data` is the file.

    Document `index` asks question number `index` of the file (SQuAD: those that have an answer).
    fixed_order: shuffle by the seed alone, as the official code does, so that a number of documents puts the
        question's own at the same place in every sample (seed 42, 26 documents: SQuAD's is always number 24).
    """

    dataset: str
    fixed_order: bool = False
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if self.dataset not in FILES:
            raise ValueError(f"dataset={self.dataset!r} is unknown; choose one of {', '.join(FILES)}")

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`. The last document that goes in is cut at a word."""
        rng = request.rng()
        asked, order, texts = self._asked(request, rng)
        ask = _ask(asked)
        counter = request.counter
        own = len(asked.gold)
        lead = counter.count(DOCUMENT.format(number=100, text="") + "\n", remember=False)  # blank line included
        costs = [c + lead for c in counter.pieces([texts[i] for i in order[:own]], "\n")]
        fixed = counter.count(HEADER) + request.tail([ask]) + sum(costs)
        left = budget = request.left(fixed, "question, its documents and answer", "max_new_tokens")
        shown = [texts[i] for i in order[:own]]
        for i in order[own:]:
            cost = counter.pieces([texts[i]], "\n")[0] + lead
            if cost > left:
                text, tokens = haystack.cut(texts[i], left - lead, counter)
                shown += [text] if text else []
                left -= lead + tokens if text else 0
                break
            shown.append(texts[i])
            left -= cost
        else:
            if left > 0.02 * budget:
                raise ValueError(
                    f"data={request.data!r} has {len(texts)} documents, too few for length={request.length}; "
                    "give the whole data set or lower length"
                )
        return Draft(self._text(request, shown, rng), (ask,), fixed + budget - left)

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`. A unit is a document; there are never fewer than the question's own."""
        rng = request.rng()
        asked, order, texts = self._asked(request, rng)
        shown = [texts[i] for i in order[: max(units, len(asked.gold))]]
        return Draft(self._text(request, shown, rng), (_ask(asked),))

    def step(self, request: Request) -> int:
        """Ten documents."""
        return 10

    def fewest(self, request: Request) -> int:
        """One document (or all of the question's own)."""
        return 1

    def _asked(self, request: Request, rng: random.Random) -> tuple[Asked, list[int], Sequence[str]]:
        """The question, all documents in the order in which they go in (its own first), and their texts."""
        questions, texts = read(self.dataset, request.data)
        number = max(0, request.index)  # the search for the size measures the first question, as RULER does
        if number >= len(questions):
            raise ValueError(
                f"index={number}: data={request.data!r} has {len(questions)} questions; lower start or count"
            )
        asked = questions[number]
        related = rng.sample(asked.related, len(asked.related))
        known = {*asked.gold, *asked.related}
        others = [i for i in range(len(texts)) if i not in known]
        rng.shuffle(others)
        return asked, [*asked.gold, *related, *others], texts

    def _text(self, request: Request, shown: list[str], rng: random.Random) -> str:
        (random.Random(request.seed) if self.fixed_order else rng).shuffle(shown)
        return HEADER + "\n\n".join(DOCUMENT.format(number=i, text=text) for i, text in enumerate(shown, 1))


def _ask(asked: Asked) -> Question:
    return Question(QUESTION.format(question=asked.question), PREFIX, asked.answers, f" {asked.answers[0]}")


@lru_cache(maxsize=4)
def read(dataset: str, path: str | None) -> tuple[tuple[Asked, ...], tuple[str, ...]]:
    """Questions and distinct documents (sorted) of an official file, plain or .gz.

    Raises FileNotFoundError where there is none, ValueError where it is of another form.
    """
    if path is None or not Path(path).is_file():
        raise FileNotFoundError(
            f"data={path!r}: no such file; download {FILES[dataset]} (data_gen/qa.py says where) "
            "and give its path as data="
        )
    try:
        raw = json.loads(haystack.read_text(Path(path)))
        questions, texts = (_squad if dataset == "squad" else _hotpotqa)(raw)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"data={path!r} is not of the form of {FILES[dataset]}: {error!r}; give that file") from None
    if not questions:
        raise ValueError(f"data={path!r} holds no question with an answer; give {FILES[dataset]}")
    return tuple(questions), tuple(texts)


def _squad(raw: Any) -> tuple[list[Asked], list[str]]:
    texts = sorted({p["context"] for article in raw["data"] for p in article["paragraphs"]})
    number = {text: i for i, text in enumerate(texts)}
    questions = []
    for article in raw["data"]:
        siblings = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            gold = number[paragraph["context"]]
            related = tuple(dict.fromkeys(i for i in siblings if i != gold))
            questions += [
                Asked(qa["question"], tuple(a["text"] for a in qa["answers"]), (gold,), related)
                for qa in paragraph["qas"]
                if not qa["is_impossible"]
            ]
    return questions, texts


def _hotpotqa(raw: Any) -> tuple[list[Asked], list[str]]:
    documents = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in raw]
    texts = sorted({text for group in documents for text in group})
    number = {text: i for i, text in enumerate(texts)}
    questions = [
        Asked(row["question"], (row["answer"],), tuple(dict.fromkeys(number[t] for t in group)))
        for row, group in zip(raw, documents, strict=True)
    ]
    return questions, texts
