"""What a task takes, a `Request`, and what it returns before measurement, a `Draft`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from leank.data_gen.haystack import SPLITS
from leank.data_gen.sample import Question
from leank.data_gen.tokens import TokenCounter
from leank.typed import Checked, OneOf

LONGEST = 2**24  # tokens; no model reads more, and a slip must not fill the memory


@dataclass(frozen=True)
class Request(Checked):
    """One document of a task."""

    name: str  # of the task
    length: Annotated[int, Ge(1), Le(LONGEST)]  # tokens of the whole prompt with its reply
    counter: TokenCounter  # counts tokens with the model's tokenizer
    seed: int  # seed, index: which document
    index: int
    questions: Annotated[int, Ge(1), Le(10_000)] = 1  # questions about the document; some tasks have fewer
    # whether the text, the longest question and its answer fill `length`. Otherwise a document has whole units, and
    # prompt + max_new_tokens stay within `length`, as in RULER.
    exact: bool = True
    essays: str | None = None  # essays, split: the natural text; see `haystack.sentences`
    split: Annotated[str, OneOf(*SPLITS)] = "all"
    data: str | None = None  # a file with the task's own data (qa_1, qa_2, cwe)
    reserve: int = 0  # tokens of `length` to leave for a chat template; see `data_gen.chat`

    @property
    def room(self) -> int:
        """Tokens of `length` that remain for text."""
        return self.length - self.reserve - self.counter.special_tokens

    def rng(self) -> random.Random:
        """Return the document's own random generator."""
        return random.Random(f"{self.name}/{self.seed}/{self.index}")

    def left(self, fixed: int) -> int:
        """Return the tokens that remain after `fixed` ones. Raises ValueError if `fixed` is more than there is."""
        if fixed > self.room:
            raise ValueError(
                f"length={self.length} is too short for task {self.name!r}: without any filler it takes "
                f"{fixed + self.length - self.room} tokens (questions={self.questions}); raise length"
            )
        return self.room - fixed

    def tail(self, questions: Sequence[Question]) -> int:
        """Count the tokens of the longest question with its answer."""
        return max(self.counter.counts([q.question + q.answer_prefix + q.target for q in questions], remember=False))


@dataclass(frozen=True)
class Draft:
    """A document's text with its questions."""

    context: str
    questions: tuple[Question, ...]
    tokens: int = 0  # tokens of the text with its longest question and answer; 0 if nobody has counted them
