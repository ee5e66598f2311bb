"""The row that every benchmark yields. `eval.benchmarks.scoring` scores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """A prompt with its answers.

    The model reads ``messages()`` through its chat template, or ``prompt`` as it is where `chat` is False; then
    `answer_prefix`, which stands after the assistant header. `context` ends where the question begins, so that a
    method may compress before or after the question.

    answers: what `metric` compares with (strings; for GSM-Infinite the integer; for InfiniteBench its label).
    stop: the reply ends at the first of these strings. ends: the last token of each of these texts ends the reply as
    end-of-text does. min_new_tokens: neither end-of-text nor `ends` is allowed earlier.
    preamble: messages before the user's turn. all_classes: class names of a classification task. length: the data
    set's own length, in its own unit. read: the question is a text that is read through the cache, and no reply
    follows. meta: whatever else the tables group by (op, template, depth, ...).
    target: the true answer as a conversation goes on with it. later: its later turns, which share the context.
    """

    task: str
    id: str
    context: str
    question: str
    answers: Sequence[Any]
    max_new_tokens: int
    metric: str
    answer_prefix: str = ""
    stop: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    min_new_tokens: int = 0
    chat: bool = True
    preamble: tuple[Message, ...] = ()
    all_classes: Sequence[str] | None = None
    length: int | None = None
    read: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    later: tuple[Row, ...] = ()

    @property
    def prompt(self) -> str:
        """The user's turn: context and question."""
        return self.context + self.question

    def messages(self) -> list[Message]:
        """The conversation up to the reply, without `answer_prefix`."""
        return [*self.preamble, {"role": "user", "content": self.prompt}]


def kept(data: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return those of the named fields that a line has, for `Row.meta`; null is as if it were missing."""
    return {name: data[name] for name in names if data.get(name) is not None}
