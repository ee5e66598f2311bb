"""Which pages of the group `rest` a request holds: those of its sink, and of the window before the next position.

During a long step (prefill) most new positions leave the window before the step ends; they get the null block, so the
step needs no memory for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from torch import Tensor

Position = TypeVar("Position", int, "Tensor")


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def window_start(first: Position, window: int, grain: int) -> Position:
    """Where the window of a step from position `first` on begins, unless the sink ends behind it; may be negative.

    grain: tokens; the window begins at a multiple of them
    """
    return (first - window) // grain * grain


@dataclass(frozen=True)
class RestBlocks:
    """The pages of `rest` by their index in a request: page i holds the positions [i * block, (i + 1) * block)."""

    block: int  # tokens of a page
    # tokens; a prefix hit ends at a multiple of them, and so up to `hit` tokens before the end of a step; 1 = no hits
    hit: int
    sink: int  # sink, window: tokens kept whole
    window: int
    every: int = 0  # tokens; prefix hits can end at multiples of them, too; 0 = only at the ends of steps
    grain: int = 1  # tokens; the window begins at a multiple of them

    @property
    def sink_pages(self) -> int:
        """Pages of the sink."""
        return _ceil(self.sink, self.block)

    def first_in_window(self, computed: int) -> int:
        """The page that holds the first position of the window, once `computed` positions are computed."""
        return max(0, window_start(computed, self.window, self.grain)) // self.block

    def tail(self, end: int) -> int:
        """The first page that a step up to `end` stores behind the sink: a prefix hit, before `end`, reads a window."""
        return self.first_in_window(max(0, end - 1) // self.hit * self.hit)

    def stored(self, page: int, end: int) -> bool:
        """Whether a step that ends before position `end` stores this page, which is new in it."""
        if page < self.sink_pages or page >= self.tail(end):
            return True
        if not self.every:
            return False
        mark = _ceil((page + 1) * self.block, self.every) * self.every
        return mark <= end and page >= self.first_in_window(mark)

    def new(self, held: int, end: int) -> list[bool]:
        """Whether each page from index `held` up to position `end` is stored."""
        return [self.stored(page, end) for page in range(held, _ceil(end, self.block))]

    def most(self, in_flight: int, longest: int, hits: bool) -> int:
        """Pages that one request holds at most.

        These are the sink, and the window that a step of `in_flight` tokens leaves. A step behind another, or behind
        a prefix hit, which a prompt can begin with if `hits`, also holds the window that it reads.
        """
        window = self.window + self.grain - 1  # the most that it has
        of_tail = _ceil(window + self.hit, self.block) + 1
        marks = 0
        if self.every:
            of_mark = _ceil(window, self.block) + 1
            passed = min(
                _ceil(min(in_flight, longest), self.every), longest // self.every
            )  # a short step passes one, too
            marks = min(passed * of_mark, _ceil(min(in_flight, longest) + window, self.block))
        windows = 2 if hits or in_flight < longest else 1
        return min(self.sink_pages + windows * of_tail + marks, _ceil(longest, self.block))
