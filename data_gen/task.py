"""What a task is: something that answers a `Request` with a `Document`.

A task offers two ways to fill a document. `fill` meets the asked length as closely as tokens allow (training);
`draw` makes a document of a number of whole units, and `data_gen.fit` looks for the number that RULER would take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from data_gen.fit import whole_units
from data_gen.request import Draft, Request
from data_gen.sample import Document


class Task(ABC):
    """A task: `fill` and `draw` say how its documents are made, `build` makes one."""

    max_new_tokens: int

    def build(self, request: Request) -> Document:
        """The document. Raises ValueError where the length is too short, FileNotFoundError where data is missing."""
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
        """A document of `request.room` tokens, the longest question with its answer included."""

    @abstractmethod
    def draw(self, request: Request, units: int) -> Draft:
        """A document with `units` whole units of filler; the same request gives the same needles and questions."""

    @abstractmethod
    def step(self, request: Request) -> int:
        """Units that RULER takes away at a time from a sample that came out too long."""

    def fewest(self, request: Request) -> int:
        """The smallest number of units that `draw` can do with."""
        return 0
