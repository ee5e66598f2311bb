"""Natural text: going on with it, and quoting a passage of it. A mask that is trained on needles alone forgets text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from leank.data_gen import haystack
from leank.data_gen.task import Draft, Question, Request, Task
from leank.typed import OneOf

GO_ON = "\nGo on with the text."
GO_ON_WITH = "\nGo on with this text: {start}"
QUOTE = '\nRepeat the passage of the text that begins with "{start}" word for word.'
WORDS = 48  # of a reply
OPENING = 8  # words by which a passage is asked for


@dataclass(frozen=True)
class Text(Task):
    """Consecutive sentences, from the user's own files where `Request.essays` names them."""

    # "go_on": the first question asks for what follows the document, the others for what follows a few words from
    # elsewhere. "quote": every question asks for a passage of the document.
    kind: Annotated[str, OneOf("go_on", "quote")] = "go_on"
    max_new_tokens: int = 128

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`; the document's end is at a random sentence, and its first one is cut at a word."""
        text, rng = haystack.sentences(request.essays, request.split), request.rng()
        end = rng.randrange(len(text))
        return filled(request, text, end, " ", lambda longest: self._ask(request, text, end, longest, rng))

    def _ask(
        self, request: Request, text: Sequence[str], end: int, context: str, rng: random.Random
    ) -> tuple[Question, ...]:
        if self.kind == "quote":
            words = context.split(" ")
            late = len(words) // 3  # the front makes room for the questions
            starts = [rng.randint(late, max(late, len(words) - WORDS)) for _ in range(request.questions)]
            passages = [words[at : at + WORDS] for at in starts]
            return tuple(_question(QUOTE, passage[:OPENING], passage) for passage in passages)
        found = [_question(GO_ON, [], _words(text, end, WORDS))]
        for _ in range(request.questions - 1):
            words = _words(text, rng.randrange(len(text)), WORDS + WORDS // 2)
            found.append(_question(GO_ON_WITH, words[: WORDS // 2], words[WORDS // 2 :]))
        return tuple(found)


def filled(
    request: Request, text: Sequence[str], end: int, separator: str, ask: Callable[[str], tuple[Question, ...]]
) -> Draft:
    """The document of the pieces of a text before piece `end`, and what is asked about the longest that has room."""
    longest, _ = haystack.take_before(text, end, request.room, request.counter, separator)
    asked = ask(longest)
    context, tokens, tail = longest, 0, request.tail(asked)
    while True:  # what the pieces of a text take is known to within a few tokens
        context, _ = haystack.take_before(text, end, request.left(tail) - tokens, request.counter, separator)
        excess = request.counter.count(context, remember=False) + tail - request.room
        if excess <= 0:
            return Draft(context, asked, request.room + excess)
        tokens += excess


def _question(form: str, start: Sequence[str], reply: Sequence[str]) -> Question:
    return Question(form.format(start=" ".join(start)), "", (" ".join(reply),), " " + " ".join(reply))


def _words(text: Sequence[str], at: int, count: int) -> list[str]:
    """Return `count` words from sentence `at` on; the text starts again at its end."""
    found: list[str] = []
    while len(found) < count:
        found += text[at % len(text)].split(" ")
        at += 1
    return found[:count]
