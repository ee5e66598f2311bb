"""Which pages of the group `rest` a request holds: plain arithmetic, without vLLM.

A request needs its sink, and the window before the next position. During a long step (prefill) most new positions leave
the window before the step ends; they get the null block, so the step needs no memory for them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestBlocks:
    """The pages of `rest` by their index in a request: page i holds the positions [i * block, (i + 1) * block).

    block: tokens of a page
    hit: tokens; a prefix hit ends at a multiple of them, and so up to `hit` tokens before the end of a step
    sink, window: tokens kept whole
    every: tokens; the window before each multiple of them is stored too, so that prefix hits can end there; 0 = only
        the ends of steps
    """

    block: int
    hit: int
    sink: int
    window: int
    every: int = 0

    @property
    def sink_pages(self) -> int:
        """Pages of the sink."""
        return _ceil(self.sink, self.block)

    def first_in_window(self, computed: int) -> int:
        """The page that holds the first position of the window, once `computed` positions are computed."""
        return max(0, computed - self.window) // self.block

    def tail(self, end: int) -> int:
        """The first page that a step which ends before position `end` stores behind the sink.

        A prefix hit on what it computed ends at a multiple of `hit`, before the last position, and reads the window
        before that.
        """
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

        in_flight: tokens of a step
        longest: tokens of a request
        hits: whether a prompt can begin with a prefix hit

        The sink, and the window that a step leaves. A step behind another one, or behind a prefix hit, also holds the
        window that it reads.
        """
        of_tail = _ceil(self.window + self.hit, self.block) + 1
        marks = 0
        if self.every:
            of_mark = _ceil(self.window, self.block) + 1
            marks = min(min(in_flight, longest) // self.every * of_mark, _ceil(min(in_flight, longest), self.block))
        windows = 2 if hits or in_flight < longest else 1
        return min(self.sink_pages + windows * of_tail + marks, _ceil(longest, self.block))


def _ceil(n: int, by: int) -> int:
    return -(-n // by)
