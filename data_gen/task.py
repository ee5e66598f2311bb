"""The base of all tasks: a task answers a `Request` with a `Document`.

A task has two ways to fill a document. `fill` meets the requested length as closely as tokens allow (training). `draw`
makes a document from a number of whole units, and `data_gen.fit` finds the number that RULER would take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from leank.data_gen.fit import whole_units
from leank.data_gen.request import Draft, Request
from leank.data_gen.sample import Document


class Task(ABC):
    """A task: `fill` and `draw` define its documents, `build` makes one.

    max_new_tokens: room for a reply.
    """

    max_new_tokens: int

    def build(self, request: Request) -> Document:
        """Make the document.

        Raises ValueError if the length is too short, FileNotFoundError if data is missing.
        """
        if request.exact:
            draft = self.fill(request)
            length = draft.tokens + request.length - request.room
        else:
            draft, length = whole_units(self, request)
        return Document(
            request.name, request.seed, request.index, draft.context, draft.questions, self.max_new_tokens, length
        )

    @abstractmethod
    def fill(self, request: Request) -> Draft:
        """Return a document of `request.room` tokens, the longest question with its answer included."""

    @abstractmethod
    def draw(self, request: Request, units: int) -> Draft:
        """Return a document with `units` whole units of filler.

        The same request gives the same needles and questions, whatever `units` is.
        """

    @abstractmethod
    def step(self, request: Request) -> int:
        """Return the units that RULER takes away at a time from a sample that is too long."""

    def fewest(self, request: Request) -> int:
        """Return the smallest number of units that `draw` accepts."""
        return 0
