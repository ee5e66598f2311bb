"""RULER's way to size a sample: whole units, found once a (task, length, seed) and lowered where a sample is too long.

The number of units is the largest with which one draw, the answer prefix and max_new_tokens stay within the length
(binary search). Samples differ from that draw by a few tokens: one that comes out too long gives up a whole step
(500 words of an essay, 25 lines, 10 documents), which is why the official samples are 3,478 or 4,093 tokens long.

Where a step is more than there is, the official code never ends; here the units are lowered by a quarter at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from data_gen.request import Draft, Request

_SEARCH = -1  # the index of the draw that the search measures


class Drawn(Protocol):
    """What is asked of a task here; see `data_gen.task.Task`."""

    max_new_tokens: int

    def draw(self, request: Request, units: int) -> Draft:
        """A document with `units` whole units of filler."""

    def step(self, request: Request) -> int:
        """Units that RULER takes away at a time."""

    def fewest(self, request: Request) -> int:
        """The smallest number of units that `draw` can do with."""


def whole_units(task: Drawn, request: Request) -> tuple[Draft, int]:
    """The document and its length: prompt, answer prefix and max_new_tokens, never above `request.length`.

    Raises ValueError where not even the fewest units fit.
    """
    fits = request.counter.fits
    key = (task, dataclasses.replace(request, index=_SEARCH, questions=1))
    if key not in fits:
        fits[key] = _search(task, key[1])
    units, step, fewest = fits[key], task.step(request), task.fewest(request)
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
    draft = task.draw(request, units)
    ends = [q.question + q.answer_prefix for q in draft.questions]
    counter = request.counter
    if len(ends) == 1:
        tokens = counter.count(draft.context + ends[0], remember=False)
    else:
        tokens = counter.count(draft.context, remember=False) + max(counter.counts(ends, remember=False))
    return draft, tokens + request.length - request.room + task.max_new_tokens
