"""A server's step on a GPU: attention over pages in one Triton launch, held equal to `eval.serving.attention`.

In a `DeviceStep` the requests that decode come first. They are one launch, whose arguments never move: lengths, block
tables and slots are the server's own tensors, which it fills anew before each step. So a step in which all requests
decode can be captured in a CUDA graph and replayed, also with fewer requests than there is room for. The requests
behind them have chunks of a prompt, which plain PyTorch computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from leank.eval.cache.attention.softmax import LOG2_E
from leank.eval.serving import attention
from leank.eval.serving.layout import HEAD_DIMS, PageLayout

TILE = 64  # tokens that a program reads at a time
PER_SM = 2  # programs per multiprocessor: all run at once
START = 24  # what it costs to begin to read, in units of 16 columns of a tile
MERGE = 64  # lines of partial results that a merge asks for at a time


@dataclass(frozen=True)
class _Layer:
    """The tables of one layer on the device.

    kept, rest: stripes and channels of each group
    even: whether every head keeps a multiple of 32 channels, so that columns need no masks
    """

    kept: tuple[Tensor, Tensor]
    rest: tuple[Tensor, Tensor]
    even: bool


class PagedAttention:
    """The kernel over the pages of one layout, with all the memory that its launches need.

    layout: whose pages are read
    device: of the pages
    q_heads: query heads of a layer
    rows: the most rows of a launch
    programs: of a launch, 0 = PER_SM per multiprocessor

    Raises ValueError for a layout that the kernel cannot read.
    """

    def __init__(
        self, layout: PageLayout, device: torch.device, q_heads: int, rows: int = 256, programs: int = 0
    ) -> None:
        if layout.head_dim not in HEAD_DIMS:
            raise ValueError(f"the paged kernel reads heads of {HEAD_DIMS} channels, not {layout.head_dim}")
        self.layout, self.rows = layout, rows
        self.heads = len(layout.kept.layers[0])
        self.group = q_heads // self.heads
        self.programs = programs or PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._layers = [self._tables(layer, device) for layer in range(len(layout.kept.layers))]
        self._every = torch.arange(layout.head_dim, dtype=torch.int32, device=device)
        # a captured launch must find its memory where it was, so all of it is taken now
        self._padded = 1 << (self.group - 1).bit_length()
        lines = (self.programs + rows * self.heads) * self._padded
        self._part = torch.empty(lines, layout.head_dim, device=device)
        self._stat = torch.empty(lines, 2, device=device)
        self._done = torch.zeros(rows * self.heads, dtype=torch.int32, device=device)

    def _tables(self, layer: int, device: torch.device) -> _Layer:
        groups = self.layout.kept, self.layout.rest
        kept, rest = ((g.table(layer).to(device), g.channels(layer).to(device)) for g in groups)
        return _Layer(kept, rest, all(head.k.count % 32 == 0 for head in self.layout.kept.layers[layer]))

    def write(self, pages: Tensor, layer: int, k: Tensor, v: Tensor, kept_slots: Tensor, rest_slots: Tensor) -> None:
        """Put tokens k, v [n, H, D] of a layer into both groups; the reference is `PageGroup.write` of each.

        kept_slots, rest_slots: int64 [n], block * group.block + token; a slot of the null block stores nothing
        """
        from leank.eval.serving.kernels import paged

        of = self._layers[layer]
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        paged.write[k.shape[:2]](
            *(pages, k, v, kept_slots, rest_slots, *of.kept, *of.rest, self._every, pages.stride(0)),
            *(*k.stride()[:2], *v.stride()[:2], of.kept[1].shape[1], of.rest[1].shape[1]),
            D=self.layout.head_dim,
            KEPT_BLOCK=self.layout.kept.block,
            REST_BLOCK=self.layout.rest.block,
        )

    def attend(
        self,
        pages: Tensor,
        layer: int,
        q: Tensor,
        lengths: Tensor,
        kept_table: Tensor,
        rest_table: Tensor,
        scaling: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """softmax(q K_sink, q_kept K_middle, q K_window) V of one decoding step, in one launch.

        Lengths and tables may change between replays of a captured launch.

        pages: [blocks, page_columns]
        q: [B, Hq, D], the query of each row's last token, whose own K and V are in the pages
        lengths: int32 [B] on the device, tokens of each row, that one included; 0 gives zeros
        kept_table, rest_table: int32 [B, blocks of a row] on the device, the pages of each group; what they hold
            behind a row's last page is not read
        scaling: factor of the logits
        out: contiguous like the result, which is put there; None = new memory

        Returns [B, Hq, D] in q's dtype.

        Raises ValueError for more rows than the memory is for.
        """
        import triton

        from leank.eval.serving.kernels import paged

        of, layout, batch = self._layers[layer], self.layout, len(q)
        if batch > self.rows:
            raise ValueError(f"{batch} rows at once are more than the {self.rows} that this kernel was made for")
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kept, rest = (
            paged.Group(table, *tables, table.stride(0), tables[1].shape[1])
            for table, tables in ((kept_table, of.kept), (rest_table, of.rest))
        )
        form = paged.Form(
            H=self.heads,
            GROUP=self.group,
            D=layout.head_dim,
            HEADS=triton.next_power_of_2(self.heads),
            BATCH=triton.next_power_of_2(self.rows),
            TILE=TILE,
            START=START,
            EVEN=of.even,
            M=max(16, self._padded),
            ROWS=self._padded,
            MERGE_LINES=max(1, MERGE // self._padded),
            KEPT_BLOCK=layout.kept.block,
            REST_BLOCK=layout.rest.block,
        )
        paged.decode[(self.programs,)](
            *(pages, pages.stride(0), q, q.stride(0), q.stride(1), out, lengths, kept, rest),
            *(self._part, self._stat, self._done, scaling * LOG2_E, batch, self.programs, layout.sink, layout.window),
            F=form,
            num_warps=4,
            num_stages=3,
        )
        return out


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
    others: attention.Step | None = None

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
            attention.attend(self.others, layer, pages, q, k, v, scaling, out)
