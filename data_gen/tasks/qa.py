"""RULER question answering: the documents of a question among others of the same data set (SQuAD, HotpotQA).

The data is not shipped. Download the official file and give its path:
    qa_1  https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json
    qa_2  http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic_core import from_json

from leank.data_gen import haystack
from leank.data_gen.amount import amount
from leank.data_gen.reading import digest, read_text
from leank.data_gen.task import Draft, Question, Request, Task
from leank.typed import OneOf, Positive

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
    """A question of the data set."""

    question: str  # question, answers: its text, and all answers that count
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # indices of its own documents
    related: tuple[int, ...] = ()  # indices of other documents of the same article (SQuAD)


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Question number `index` of the file `Request.data`, of those with an answer, with its documents among others."""

    dataset: Annotated[str, OneOf(*FILES)]
    max_new_tokens: Positive = 32  # room for the reply

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`; the last document is cut at a word."""
        rng = request.rng()
        asked, order, texts = self._asked(request, rng)
        ask = _ask(asked)
        counter = request.counter
        own = len(asked.gold)
        lead = counter.count(DOCUMENT.format(number=100, text="") + "\n", remember=False)  # blank line included
        costs = [c + lead for c in counter.pieces([texts[i] for i in order[:own]], "\n")]
        fixed = counter.count(HEADER) + request.tail([ask]) + sum(costs)
        left = budget = request.left(fixed)
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
                    f"data={request.data!r} has {amount(len(texts), 'document')}, too few for length={request.length}; "
                    "give the whole data set or lower length"
                )
        return Draft(self._text(shown, rng), (ask,), fixed + budget - left)

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; a unit is a document, and the question's own are always there."""
        rng = request.rng()
        asked, order, texts = self._asked(request, rng)
        shown = [texts[i] for i in order[: max(units, len(asked.gold))]]
        return Draft(self._text(shown, rng), (_ask(asked),))

    def fewest(self, request: Request) -> int:
        """Return one document; `draw` adds the rest of the question's own."""
        return 1

    def _asked(self, request: Request, rng: random.Random) -> tuple[Asked, list[int], Sequence[str]]:
        """Return the question, the indices of all documents (its own first), and their texts."""
        questions, texts = read(self.dataset, request.data)
        number = max(0, request.index)  # the search for the size measures the first question, as RULER does
        if number >= len(questions):
            raise ValueError(
                f"index={number}: data={request.data!r} has {amount(len(questions), 'question')}; lower start or count"
            )
        asked = questions[number]
        related = rng.sample(asked.related, len(asked.related))
        known = {*asked.gold, *asked.related}
        others = [i for i in range(len(texts)) if i not in known]
        rng.shuffle(others)
        return asked, [*asked.gold, *related, *others], texts

    @staticmethod
    def _text(shown: list[str], rng: random.Random) -> str:
        rng.shuffle(shown)
        return HEADER + "\n\n".join(DOCUMENT.format(number=i, text=text) for i, text in enumerate(shown, 1))


def _ask(asked: Asked) -> Question:
    return Question(QUESTION.format(question=asked.question), PREFIX, asked.answers, f" {asked.answers[0]}")


def read(dataset: str, path: str | None) -> tuple[tuple[Asked, ...], tuple[str, ...]]:
    """Return the questions and the sorted distinct documents of an official file, plain or .gz.

    Raises FileNotFoundError if there is no file, ValueError if it has another form.
    """
    return _loaded(dataset, path)[:2]


def known_by(dataset: str, path: str | None) -> str:
    """Return the digest of the file's contents, which its place does not change; raises what `read` raises."""
    return _loaded(dataset, path)[2]


@lru_cache(maxsize=4)
def _loaded(dataset: str, path: str | None) -> tuple[tuple[Asked, ...], tuple[str, ...], str]:
    if path is None or not Path(path).is_file():
        raise FileNotFoundError(
            f"data={path!r}: no such file; download {FILES[dataset]} (data_gen/tasks/qa.py says where) "
            "and give its path as data="
        )
    text = read_text(Path(path))
    try:
        questions, texts = (_squad if dataset == "squad" else _hotpotqa)(text)
        asked = (text for one in questions for text in (one.question, *(one.answers or ("",))))
        if not all(isinstance(text, str) and text.strip() for text in (*texts, *asked)):
            raise ValueError("a document, a question or an answer is blank or no text")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"data={path!r} is not of the form of {FILES[dataset]} ({error!r}); give that file") from None
    if not questions:
        raise ValueError(f"data={path!r} holds no question with an answer; give {FILES[dataset]}")
    return tuple(questions), tuple(texts), digest(text)


def _squad(text: str) -> tuple[list[Asked], list[str]]:
    articles = [article["paragraphs"] for article in from_json(text)["data"]]
    texts = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: i for i, text in enumerate(texts)}
    questions = []
    for article in articles:
        siblings = [number[paragraph["context"]] for paragraph in article]
        for paragraph, gold in zip(article, siblings, strict=True):
            related = tuple(dict.fromkeys(i for i in siblings if i != gold))
            for qa in paragraph["qas"]:
                if qa["is_impossible"] is False:
                    answers = tuple(answer["text"] for answer in qa["answers"])
                    questions.append(Asked(qa["question"], answers, (gold,), related))
    return questions, texts


def _hotpotqa(text: str) -> tuple[list[Asked], list[str]]:
    rows = from_json(text)
    documents = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in rows]
    texts = sorted({text for of_row in documents for text in of_row})
    number = {text: i for i, text in enumerate(texts)}
    questions = [
        Asked(row["question"], (row["answer"],), tuple(dict.fromkeys(number[text] for text in of_row)))
        for row, of_row in zip(rows, documents, strict=True)
    ]
    return questions, texts
