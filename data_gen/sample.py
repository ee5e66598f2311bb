"""What a task yields: a document with questions, and the flat rows made of both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question about a document.

    question: text that follows the document verbatim; it begins with its own separator.
    answer_prefix: the start of the reply, which the model is given after the assistant header.
    answers: the references that a scorer compares with.
    target: the supervised answer: all references, in the order in which a model is trained to write them.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Sample:
    """One row: a `Document` with one `Question`, whose fields it has.

    task, seed, index, context, max_new_tokens, length: see `Document`.
    question, answer_prefix, answers, target: see `Question`; the first two follow the context.
    """

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

    task, seed, index: which document.
    context: the text.
    questions: questions about it.
    max_new_tokens: room for a reply.
    length: tokens of the document with its longest question, special tokens and chat template included. A document
        filled exactly also counts that question's answer; one sized as in RULER counts max_new_tokens in its place.
    framed: whether the texts hold the chat template already, so that nothing is to be put around them.
    """

    task: str
    seed: int
    index: int
    context: str
    questions: tuple[Question, ...]
    max_new_tokens: int
    length: int
    framed: bool = False

    def samples(self) -> list[Sample]:
        """Return one flat row per question."""
        return [
            Sample(
                self.task, self.seed, self.index, self.context,
                q.question, q.answer_prefix, q.answers, q.target, self.max_new_tokens, self.length,
            )
            for q in self.questions
        ]  # fmt: skip
