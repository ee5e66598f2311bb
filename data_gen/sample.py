"""What a task yields: one document, several questions about it, and the flat rows made of both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question about a document.

    question: text that follows the document verbatim (it begins with its own separator).
    answer_prefix: the start of the reply, given to the model (after the assistant header of a chat model).
    answers: the references a scorer compares with.
    target: the supervised answer; all references, in the order a model is trained to write them.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Sample:
    """One (context, answer) pair. `context` ends with the document; `question` and `answer_prefix` follow it."""

    task: str
    seed: int
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str
    max_new_tokens: int
    length: int


@dataclass(frozen=True)
class Document:
    """A document with its questions.

    length: tokens of the document with its longest question and, where it was filled exactly, that one's answer;
    sized as RULER does, prompt and answer prefix (special tokens, chat template) with max_new_tokens.
    """

    task: str
    seed: int
    index: int
    context: str
    questions: tuple[Question, ...]
    max_new_tokens: int
    length: int

    def samples(self) -> list[Sample]:
        """One flat row a question."""
        return [
            Sample(
                self.task, self.seed, self.index, self.context,
                q.question, q.answer_prefix, q.answers, q.target, self.max_new_tokens, self.length,
            )
            for q in self.questions
        ]  # fmt: skip
