"""RULER's way to size a sample: a number of whole units, and fewer of them for a sample that is too long.

A binary search per (task, length, seed) finds the largest number of units with which one draw, the answer prefix and
max_new_tokens stay within the length. Samples differ from that draw by a few tokens. One that is too long loses a whole
step (500 words of an essay, 25 lines, 10 documents). That is why official samples have 3,478 or 4,093 tokens.

Below 4,096 tokens, RULER's shortest length, a step would be most of a sample: 500 words are 700 tokens. There the
search is made for each sample, which falls short by less than a unit.

The official code never ends if a step is larger than the number of units; here the units fall by a quarter at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from leank.data_gen.request import Draft, Request

SHORT = 4096  # tokens; below, every sample has a search of its own
_SEARCH = -1  # the index of the draw that the search measures


class Drawn(Protocol):
    """The part of a task (`data_gen.task.Task`) that sizing needs."""

    max_new_tokens: int

    def draw(self, request: Request, units: int) -> Draft:
        """Return a document with `units` whole units of filler."""

    def step(self, request: Request) -> int:
        """Return the units that RULER takes away at a time."""

    def fewest(self, request: Request) -> int:
        """Return the smallest number of units that `draw` accepts."""


def whole_units(task: Drawn, request: Request) -> tuple[Draft, int]:
    """Return the document and its length, which is never above `request.length`.

    The length counts the tokens of prompt, answer prefix and max_new_tokens.

    Raises ValueError if the fewest units do not fit.
    """
    if request.length < SHORT:
        return _fitting(task, request, _search(task, request))
    fits = request.counter.fits
    key = (task, dataclasses.replace(request, index=_SEARCH, questions=1))
    if key not in fits:
        fits[key] = _search(task, key[1])
    return _fitting(task, request, fits[key])


def _fitting(task: Drawn, request: Request, units: int) -> tuple[Draft, int]:
    """Return the document of so many units or, as long as that is too long, of fewer; see `whole_units`."""
    step, fewest = task.step(request), task.fewest(request)
    while True:
        draft, length = _measure(task, request, units)
        if length <= request.length:
            return draft, length
        if units <= fewest:
            raise ValueError(
                f"length={request.length} is too short for task {request.name!r}: the smallest sample takes {length} "
                f"tokens, {task.max_new_tokens} for the reply included; raise length"
            )
        units = max(fewest, units - step if units - step > fewest else units - max(1, (units - fewest) // 4))


def _search(task: Drawn, request: Request) -> int:
    """Find the largest number of units that fits, by doubling and then halving the range."""
    low = task.fewest(request)
    high = low + max(1, task.step(request))
    draft, length = _measure(task, request, high)
    while length <= request.length:
        low, high = high, high + 2 * (high - low)
        longer, length = _measure(task, request, high)
        if len(longer.context) <= len(draft.context):
            return low  # the data has no more to give
        draft = longer
    while high - low > 1:
        middle = (low + high) // 2
        if _measure(task, request, middle)[1] <= request.length:
            low = middle
        else:
            high = middle
    return low


def _measure(task: Drawn, request: Request, units: int) -> tuple[Draft, int]:
    """Return a draw of so many units, and its length with max_new_tokens."""
    draft = task.draw(request, units)
    ends = [q.question + q.answer_prefix for q in draft.questions]
    counter = request.counter
    if len(ends) == 1:
        tokens = counter.count(draft.context + ends[0], remember=False)
    else:
        tokens = counter.count(draft.context, remember=False) + max(counter.counts(ends, remember=False))
    return draft, tokens + request.length - request.room + task.max_new_tokens
