"""Source code: going on with it. Tokens, indentation and names of code are not those of prose."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from leank.data_gen import source_code
from leank.data_gen.task import Draft, Question, Request, Task
from leank.data_gen.tasks.text import filled

GO_ON = "\nGo on with the code."
GO_ON_WITH = "\nGo on with this code:\n{start}"
LINES = 12  # of a reply


@dataclass(frozen=True)
class Code(Task):
    """Consecutive lines of Python's standard library, with their indentation.

    The first question asks for what follows the document, the others for what follows a few lines from elsewhere.
    """

    max_new_tokens: int = 256

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`; the document's end is at a random line."""
        text, rng = source_code.lines(None, request.split), request.rng()
        end = rng.randrange(len(text))
        return filled(request, text, end, "\n", lambda longest: self._ask(request, text, end, rng))

    def _ask(self, request: Request, text: Sequence[str], end: int, rng: random.Random) -> tuple[Question, ...]:
        found = [_question(GO_ON, _lines(text, end))]
        for _ in range(request.questions - 1):
            at = rng.randrange(len(text))
            start = "\n".join(_lines(text, at))
            found.append(_question(GO_ON_WITH.format(start=start), _lines(text, at + LINES)))
        return tuple(found)


def _lines(text: Sequence[str], at: int) -> list[str]:
    """Return the lines from line `at` on; the text starts again at its end."""
    return [text[(at + i) % len(text)] for i in range(LINES)]


def _question(form: str, lines: Sequence[str]) -> Question:
    reply = "\n".join(lines)
    return Question(form, "", (reply,), "\n" + reply)
