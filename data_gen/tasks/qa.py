"""RULER question answering: the documents of a question among others of the same data set (SQuAD, HotpotQA).

The data is not shipped. Download the official file and give its path:
    qa_1  https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json
    qa_2  http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from leank.data_gen import haystack
from leank.data_gen.amount import amount
from leank.data_gen.reading import digest, parse_json, read_text
from leank.data_gen.request import Draft, Request
from leank.data_gen.sample import Question
from leank.data_gen.task import Task

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
HEADER = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n"
QUESTION = f"\n\n{_INSTRUCTION}\n\nQuestion: {{question}}"
PREFIX = " Answer:"
DOCUMENT = "Document {number}:\n{text}"
FILES = {"squad": "SQuAD's dev-v2.0.json", "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json"}
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A question of the data set.

    question, answers: its text, and all answers that count.
    gold: indices of its own documents.
    related: indices of other documents of the same article (SQuAD).
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """One question of a data set with its documents among others.

    Document `index` asks question number `index` of the file `Request.data`; SQuAD's questions without an answer do
    not count.

    dataset: "squad" or "hotpotqa".
    fixed_order: whether the seed alone shuffles, as in the official code. Samples with equally many documents then
        have the question's own at the same place (seed 42, 26 documents: SQuAD's is always number 24).
    max_new_tokens: room for the reply.

    Raises ValueError for an unknown data set.
    """

    dataset: str
    fixed_order: bool = False
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        if self.dataset not in FILES:
            raise ValueError(f"dataset={self.dataset!r} is unknown; choose one of {', '.join(FILES)}")

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
                    f"data={request.data!r} has {amount(len(texts), 'document')}, too few for length={request.length}; "
                    "give the whole data set or lower length"
                )
        return Draft(self._text(request, shown, rng), (ask,), fixed + budget - left)

    def draw(self, request: Request, units: int) -> Draft:
        """See `Task.draw`; a unit is a document, and the question's own are always there."""
        rng = request.rng()
        asked, order, texts = self._asked(request, rng)
        shown = [texts[i] for i in order[: max(units, len(asked.gold))]]
        return Draft(self._text(request, shown, rng), (_ask(asked),))

    def step(self, request: Request) -> int:
        """Return ten documents."""
        return 10

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

    def _text(self, request: Request, shown: list[str], rng: random.Random) -> str:
        (random.Random(request.seed) if self.fixed_order else rng).shuffle(shown)
        return HEADER + "\n\n".join(DOCUMENT.format(number=i, text=text) for i, text in enumerate(shown, 1))


def _ask(asked: Asked) -> Question:
    return Question(QUESTION.format(question=asked.question), PREFIX, asked.answers, f" {asked.answers[0]}")


def read(dataset: str, path: str | None) -> tuple[tuple[Asked, ...], tuple[str, ...]]:
    """Return the questions and the sorted distinct documents of an official file, plain or .gz.

    dataset: "squad" or "hotpotqa".

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
        questions, texts = (_squad if dataset == "squad" else _hotpotqa)(parse_json(text))
    except ValueError as error:
        raise ValueError(f"data={path!r} is not of the form of {FILES[dataset]}: {error}; give that file") from None
    if not questions:
        raise ValueError(f"data={path!r} holds no question with an answer; give {FILES[dataset]}")
    return tuple(questions), tuple(texts), digest(text)


def _squad(raw: object) -> tuple[list[Asked], list[str]]:
    articles = [
        [
            (_text(paragraph, "context", where), _list(paragraph, "qas", where), where)
            for where, paragraph in _numbered(_list(article, "paragraphs", at), f"{at}.paragraphs")
        ]
        for at, article in _numbered(_list(raw, "data", "the file"), "data")
    ]
    texts = sorted({context for article in articles for context, _, _ in article})
    number = {text: i for i, text in enumerate(texts)}
    questions, seen = [], set[str]()
    for article in articles:
        siblings = [number[context] for context, _, _ in article]
        for context, asked, at in article:
            gold = number[context]
            related = tuple(dict.fromkeys(i for i in siblings if i != gold))
            for where, qa in _numbered(asked, f"{at}.qas"):
                impossible = _field(qa, "is_impossible", bool, where, "true or false")
                if not impossible:
                    found = _numbered(_list(qa, "answers", where), f"{where}.answers")
                    answers = tuple(_text(answer, "text", place) for place, answer in found)
                    if not answers:
                        raise ValueError(f"{where} has no answers, and is_impossible is false")
                    _check_new(_given(qa, "id"), where, seen)
                    questions.append(Asked(_text(qa, "question", where), answers, (gold,), related))
    return questions, texts


def _hotpotqa(raw: object) -> tuple[list[Asked], list[str]]:
    if not isinstance(raw, list):
        raise ValueError("the file must be a list of questions")
    rows, seen = [], set[str]()
    for where, row in _numbered(raw, "question "):
        documents = []
        for place, pair in _numbered(_list(row, "context", where), f"{where}.context"):
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and _are_texts(pair[1])):
                raise ValueError(f"{place} must be a title and a list of sentences")
            documents.append(f"{pair[0]}\n{''.join(pair[1])}")
        if not documents:
            raise ValueError(f"{where}.context is empty")
        _check_new(_given(row, "_id"), where, seen)
        rows.append((_text(row, "question", where), _text(row, "answer", where), documents))
    texts = sorted({text for _, _, documents in rows for text in documents})
    number = {text: i for i, text in enumerate(texts)}
    questions = [
        Asked(question, (answer,), tuple(dict.fromkeys(number[text] for text in documents)))
        for question, answer, documents in rows
    ]
    return questions, texts


def _numbered(items: Sequence[object], name: str) -> list[tuple[str, object]]:
    """Pair each item with its name in messages."""
    return [(f"{name}[{i}]", item) for i, item in enumerate(items)]


def _field(holder: object, name: str, kind: type[T], where: str, must: str) -> T:
    found = _given(holder, name)
    if not isinstance(found, kind):
        raise ValueError(f'{where} has no "{name}" that is {must}')
    return found


def _given(holder: object, name: str) -> object:
    """Return the value of a name in an object; None where there is none."""
    return holder.get(name) if isinstance(holder, dict) else None


def _list(holder: object, name: str, where: str) -> list[object]:
    return _field(holder, name, list, where, "a list")


def _text(holder: object, name: str, where: str) -> str:
    found = _field(holder, name, str, where, "a text")
    if not found.strip():
        raise ValueError(f'"{name}" of {where} is blank')
    return found


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _check_new(name: object, where: str, seen: set[str]) -> None:
    """Raise ValueError for an id that an earlier question has: the question would count twice."""
    if name is not None and repr(name) in seen:
        raise ValueError(f"{where} has the id {str(name)[:60]!r} of another question")
    seen.add(repr(name))
