"""One step of a server: which of its tokens decode, which belong to a longer chunk, and where their past lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from leank.eval.serving.layout import PageGroup, PageLayout


@dataclass(frozen=True)
class Places:
    """Positions of R requests and where the group `rest` holds them.

    at: int64 [R, S], positions, 0 where there is none
    real: bool [R, S], whether there is one
    block, token: int64 [R, S], the page, and the token in it
    """

    at: Tensor
    real: Tensor
    block: Tensor
    token: Tensor

    def only_real(self) -> Places:
        """The real places of a single request."""
        return Places(*(x[:, self.real[0]] for x in (self.at, self.real, self.block, self.token)))


@dataclass(frozen=True)
class DecodingRequests:
    """The requests of a step with one new position each.

    rows: int64 [R], their rows in the step's tokens
    blocks: int64 [R, n], their pages of `kept`
    seen: bool [R, n * block], whether there is a token in each place of these pages
    whole: the positions of sink and window, the new one included
    """

    rows: Tensor
    blocks: Tensor
    seen: Tensor
    whole: Places


@dataclass(frozen=True)
class Chunk:
    """A request of a step with several new positions.

    rows: their rows in the step's tokens
    first: the first new position; all before it are in pages
    generated: how many of the new positions the model generated before; the request had been preempted
    blocks: int64 [n], pages of `kept` of the positions before `first`
    whole: the positions before `first` in sink and window, R = 1
    """

    rows: slice
    first: int
    generated: int
    blocks: Tensor
    whole: Places


class Step:
    """What one step computes; it is made once, and every layer reads it.

    layout: the page layout
    starts: [R + 1], the first row of each request in the step's tokens
    ends: [R], positions of each request once the step is done
    prompts: [R], tokens of each prompt
    kept, rest: int [R, blocks], block tables; what the step makes lies on their device
    """

    def __init__(
        self, layout: PageLayout, starts: list[int], ends: list[int], prompts: list[int], kept: Tensor, rest: Tensor
    ) -> None:
        self.layout, self.starts, self.ends, self.prompts = layout, starts, ends, prompts
        self.tables = kept, rest
        self._new = [end - start for start, end in pairwise(starts)]

    @cached_property
    def decoding(self) -> DecodingRequests | None:
        """The requests that decode, if any; padded requests have no new position."""
        which = [i for i, new in enumerate(self._new) if new == 1]
        if not which:
            return None
        kept, rest = (table[which].long() for table in self.tables)
        ends = torch.tensor([self.ends[i] for i in which], device=kept.device)
        block = self.layout.kept.block
        blocks = kept[:, : -(-int(ends.max()) // block)]
        seen = torch.arange(blocks.shape[1] * block, device=kept.device) < ends[:, None]
        rows = torch.tensor([self.starts[i] for i in which], device=kept.device)
        return DecodingRequests(rows, blocks, seen, places(self.layout, rest, ends - 1, ends))

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The requests with several new positions."""
        found = []
        for i, new in enumerate(self._new):
            if new > 1:
                end, first = self.ends[i], self.ends[i] - new
                blocks = self.tables[0][i, : -(-first // self.layout.kept.block)].long()
                at = torch.tensor([first], device=blocks.device)
                whole = places(self.layout, self.tables[1][i : i + 1].long(), at, at).only_real()
                rows = slice(self.starts[i], self.starts[i + 1])
                found.append(Chunk(rows, first, min(new, max(0, end - self.prompts[i])), blocks, whole))
        return found

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """The slots of the new positions in `kept` and `rest`, int64 [tokens]; -1 = not stored."""
        tokens = self.starts[-1]
        both = torch.full((2, tokens), -1, dtype=torch.long, device=self.tables[0].device)
        for i, new in enumerate(self._new):
            at = torch.arange(self.ends[i] - new, self.ends[i], device=both.device)
            for slots, group, table in zip(both, (self.layout.kept, self.layout.rest), self.tables, strict=True):
                slots[self.starts[i] : self.starts[i + 1]] = slots_of(group, table[i].long(), at)
        return both[0], both[1]


def slots_of(group: PageGroup, table: Tensor, at: Tensor) -> Tensor:
    """The slot of each position `at` of the request with this block table, -1 in the null block."""
    block = table[at // group.block]
    return torch.where(block > 0, block * group.block + at % group.block, -1)


def places(layout: PageLayout, table: Tensor, first: Tensor, end: Tensor) -> Places:
    """Where `rest` holds what steps from position `first` on read whole, up to position `end`.

    table: int64 [R, blocks]
    first, end: int64 [R]
    """
    window = torch.clamp(first - layout.window, min=layout.sink)
    sink = torch.arange(layout.sink, device=table.device).expand(len(first), -1)
    longest = max(0, int((end - window).max()))
    at = torch.cat([sink, window[:, None] + torch.arange(longest, device=table.device)], 1)
    real = at < end[:, None]
    at = at.where(real, 0)
    block = table.gather(1, at // layout.rest.block) if at.shape[1] else at
    return Places(at, real, block, at % layout.rest.block)
