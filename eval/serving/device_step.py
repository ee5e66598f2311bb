"""A server's step on a GPU: the requests that decode come first and are one launch, whose arguments never move.

The lengths, the block tables and the slots are the server's own tensors, which it fills anew before each step. So a
step in which all requests decode can be captured in a CUDA graph and replayed, also with fewer requests than there is
room for. The requests behind them have chunks of a prompt. They are computed by `eval.serving.attention`, which is the
reference for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from leank.eval.serving.attention import attend
from leank.eval.serving.paged import PagedAttention
from leank.eval.serving.step import Step


def decoding_first(starts: Sequence[int], tokens: int) -> int:
    """How many of the first requests have one new position, or none, as padding has, and a row each.

    starts: [R + 1], the first row of each request in the step's tokens
    tokens: rows of the step, padding included
    """
    many = [new > 1 for new in (end - start for start, end in pairwise(starts))]
    return min(many.index(True) if any(many) else len(many), tokens)


@dataclass(frozen=True)
class DeviceStep:
    """What one step computes; every layer reads it.

    decodes: requests at the front with at most one new position; request i has row i of the step's tokens
    lengths: int32 [R], positions of each request once the step is done; 0 = padding
    tables: int32 [R, blocks] each, the block tables of `kept` and `rest`
    slots: int64 [tokens] each, the slots of the new positions in `kept` and `rest`; a slot of the null block or below
        stores nothing
    others: the step of the requests behind the first `decodes`, None = there are none
    """

    decodes: int
    lengths: Tensor
    tables: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor]
    others: Step | None = None

    def attend(
        self,
        paged: PagedAttention,
        layer: int,
        pages: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        out: Tensor,
    ) -> None:
        """Store the step's K and V, and write its attention to `out`.

        pages: [blocks, page_columns]
        q, out: [tokens, Hq, D], out contiguous
        k, v: [tokens, H, D]
        scaling: factor of the logits
        """
        tokens, first = len(self.slots[0]), self.decodes
        paged.write(pages, layer, k[:tokens], v[:tokens], *self.slots)
        if first:
            kept, rest = (table[:first] for table in self.tables)
            paged.attend(pages, layer, q[:first], self.lengths[:first], kept, rest, scaling, out[:first])
        if self.others is not None:
            attend(self.others, layer, pages, q, k, v, scaling, out)
