"""A server's step on a GPU: attention over pages in one Triton launch, held equal to `eval.serving.attention`.

In a `DeviceStep` the requests that decode come first. They are one launch, whose arguments never move: lengths, block
tables and slots are the server's own tensors, which it fills anew before each step. So a step in which all requests
decode can be captured in a CUDA graph and replayed, also with fewer requests than there is room for. The requests
behind them have chunks of a prompt: one launch gathers what they see, FlashAttention computes them
(`eval.serving.prefill`). Only what a preempted request computes again is left to plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.softmax import LOG2_E
from leank.eval.serving import attention
from leank.eval.serving.layout import STRIPE
from leank.eval.serving.prefill import Batch, Varlen, batches, plain

TILE = 64  # tokens that a program reads at a time
PER_SM = 2  # programs per multiprocessor: all run at once
MERGE = 64  # lines of partial results that a merge asks for at a time


@dataclass(frozen=True)
class LayerTables:
    """The tables of one layer on the device."""

    kept: tuple[Tensor, Tensor]  # kept, rest: stripes and channels of each group; of codes, as `kernels.coded` has them
    rest: tuple[Tensor, Tensor]
    even: bool  # whether every head keeps a multiple of 32 channels, so that columns need no masks
    # int32 [H, D], the column of each channel in its stripe of `kept`, -1 - c for column c of `rest`; of codes,
    # int32 [H, OF_BANDS], the bands of each head
    columns: Tensor
    costs: Tensor  # int32 [H, 2], length on a launch's line of a tile of the middle, and of one of the ends
    place: Tensor  # int32 [H], the place of each head among those with a middle, or among those without
    full: Tensor  # full, few: int64, query heads with a middle, and those without
    few: Tensor


class PagedAttention:
    """The kernel over the pages of one layout, with all the memory that its launches need.

    layout: of a mask; `eval.serving.paged_codes` has the one for a layout of bits
    q_heads: query heads of a layer; rows: the most rows of a launch; varlen: attention of chunks
    programs: of a launch, 0 = PER_SM per multiprocessor
    Raises ValueError for a layout that the kernel cannot read.
    """

    head_dims = HEAD_DIMS["paged"]
    start = 24  # what it costs to begin to read, in the unit of costs: here 16 columns of a tile
    page_bytes = 0  # of codes, bytes of 64 tokens
    warps = 4  # of a program
    compiled = "write, decode and gather by Triton"  # what `warm_up` compiles, for a log

    def __init__(
        self,
        layout: Any,
        device: torch.device,
        q_heads: int,
        rows: int = 256,
        programs: int = 0,
        varlen: Varlen = plain,
    ) -> None:
        if layout.head_dim not in self.head_dims:
            raise ValueError(f"the paged kernel reads heads of {self.head_dims} channels, not {layout.head_dim}")
        self.rows, self.varlen = rows, varlen
        self.layout, self.heads = layout, len(layout.kept.layers[0])
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

    def _tables(self, layer: int, device: torch.device) -> LayerTables:
        groups = self.layout.kept, self.layout.rest
        kept, rest = ((g.table(layer).to(device), g.channels(layer).to(device)) for g in groups)
        heads = self.layout.kept.layers[layer]
        columns = torch.empty(len(heads), self.layout.head_dim, dtype=torch.int32)
        for row, of_kept, of_rest in zip(columns, heads, self.layout.rest.layers[layer], strict=True):
            row[of_kept.channels] = torch.arange(of_kept.k.count, dtype=torch.int32)
            row[of_rest.channels] = -1 - torch.arange(of_rest.k.count, dtype=torch.int32)
        width, dim = kept[0][:, 1].cpu(), self.layout.head_dim
        middle = torch.where(width > 0, width + dim, 0)
        costs = torch.stack([middle, width + rest[0][:, 1].cpu() + dim], -1) // STRIPE
        even = all(head.k.count % 32 == 0 for head in heads)
        return LayerTables(kept, rest, even, *(x.to(device) for x in (columns, costs, *self._sight(layer))))

    def _sight(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last three tables of a layer."""
        full = ~self.layout.empty(layer)
        place = torch.where(full, full.cumsum(0), (~full).cumsum(0)).int() - 1
        of_queries = full.repeat_interleave(self.group)
        return place, of_queries.nonzero()[:, 0], (~of_queries).nonzero()[:, 0]

    def _reader(self) -> tuple[Any, Any]:
        """What reads a head's pages within `paged.decode`, and what it is compiled for besides."""
        from leank.eval.serving.kernels import paged

        return paged.read_columns, None

    def warm_up(self, dtype: torch.dtype, longest: int) -> None:
        """Compile all kernels for block tables of `longest` positions, so that no request waits for that."""
        layout, device = self.layout, self._done.device
        pages = torch.zeros(1, layout.page_columns, dtype=dtype, device=device)
        kept, rest = (
            torch.zeros(1, -(-longest // group.block), dtype=torch.int32, device=device)
            for group in (layout.kept, layout.rest)
        )
        q = torch.zeros(1, self.heads * self.group, layout.head_dim, dtype=dtype, device=device)
        k, length = q[:, : self.heads], torch.ones(1, dtype=torch.int32, device=device)
        nowhere = torch.full((1,), -1, device=device)
        batch = batches(layout, [0, 1], [2], [0], 2, device)[0]
        step = DeviceStep(1, length, (kept, rest), (nowhere, nowhere), [batch])
        for layer in range(len(self._layers)):
            self.store(pages, layer, k, k, step)
            self.schedule(length)
            self.attend(pages, layer, q, length, kept, rest, 1.0)
            self.gather(pages, layer, k, k, batch, kept, rest)

    def store(self, pages: Tensor, layer: int, k: Tensor, v: Tensor, step: DeviceStep) -> None:
        """Put a step's tokens k, v [n, H, D] of a layer into pages; the reference is `attention.write`."""
        self.write(pages, layer, k, v, *step.slots)

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

    def _refuse(self, batch: int) -> None:
        """Raise ValueError for more rows than the memory is for."""
        if batch > self.rows:
            raise ValueError(f"{batch} rows at once are more than the {self.rows} that this kernel was made for")

    def schedule(self, lengths: Tensor) -> None:
        """Divide a decoding step's work among programs, before its first layer is read; lengths: as for `attend`.

        Here every program does so for itself.
        """

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
        """softmax(q K_sink, q_kept K_middle, q K_window) V of a decoding step, [B, Hq, D] in q's dtype, in one launch.

        Lengths and tables may change between replays of a captured launch.
        pages: [blocks, page_columns]
        q: [B, Hq, D], the query of each row's last token, whose own K and V are in the pages
        lengths: int32 [B] on the device, tokens of each row, that one included; 0 gives zeros
        kept_table, rest_table: int32 [B, blocks of a row] on the device; behind a row's last page nothing is read
        out: contiguous like the result, which is put there; None = new memory
        Raises ValueError for more rows than the memory is for.
        """
        import triton

        from leank.eval.serving.kernels import paged

        of, layout, batch = self._layers[layer], self.layout, len(q)
        self._refuse(batch)
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
            START=self.start,
            EVEN=of.even,
            M=max(16, self._padded),
            ROWS=self._padded,
            MERGE_LINES=max(1, MERGE // self._padded),
            KEPT_BLOCK=layout.kept.block,
            REST_BLOCK=layout.rest.block,
            WARPS=self.warps,
        )
        read, codes = self._reader()
        paged.decode[(self.programs,)](
            *(
                pages,
                pages.stride(0),
                q,
                q.stride(0),
                q.stride(1),
                out,
                lengths,
                kept,
                rest,
                of.columns,
                self.page_bytes,
            ),
            of.costs,
            *(self._part, self._stat, self._done, scaling * LOG2_E, batch, self.programs, layout.sink, layout.window),
            F=form,
            READ=read,
            CODES=codes,
            num_warps=self.warps,
            num_stages=3,
        )
        return out

    def gather(
        self, pages: Tensor, layer: int, k: Tensor, v: Tensor, batch: Batch, kept_table: Tensor, rest_table: Tensor
    ) -> list[Tensor]:
        """K and V of all that a batch sees, [tokens, heads, D] each: of heads with a middle, and of those without.

        pages: [blocks, page_columns]; k, v: [tokens, H, D] of the step
        kept_table, rest_table: int32 [R, blocks], block tables of the step
        """
        of, dim = self._layers[layer], self.layout.head_dim
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        heads = len(of.full) // self.group, len(of.few) // self.group
        sizes = [(tokens, some, dim) for tokens, some in zip(batch.tokens, heads, strict=True) for _ in range(2)]
        found = [k.new_empty(size) for size in sizes]
        longest = batch.longest[1] if heads[0] else batch.longest[2]
        strides = *k.stride()[:2], *v.stride()[:2], heads[0] * dim, heads[1] * dim
        numbers = batch.requests + 1, batch.request, batch.rows.start, self.layout.sink, self.layout.window
        self._gather(
            (-(-longest // TILE), batch.requests, self.heads), of, (pages, k, v, *found, batch.plan), strides,
            (kept_table, rest_table), numbers,
        )  # fmt: skip
        return found

    def _gather(
        self,
        grid: tuple[int, int, int],
        of: LayerTables,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        tables: tuple[Tensor, Tensor],
        numbers: tuple[int, ...],
    ) -> None:
        from leank.eval.serving.kernels import gather

        gather.gather[grid](
            *(*tensors, *tables, of.kept[0], of.rest[0], of.columns, of.place, tensors[0].stride(0), *strides),
            *(*(table.stride(0) for table in tables), *numbers),
            D=self.layout.head_dim,
            TILE=TILE,
            KEPT_BLOCK=self.layout.kept.block,
            REST_BLOCK=self.layout.rest.block,
        )

    def prefill(
        self,
        pages: Tensor,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kept_table: Tensor,
        rest_table: Tensor,
        scaling: float,
        out: Tensor,
    ) -> None:
        """Write the attention of a batch of chunks to its rows of `out`; the reference is `attention.prefill`.

        q, out: [tokens, Hq, D] of the step; the other arguments are those of `gather`
        """
        starts, at = batch.plan, batch.rows
        q, out = q[at], out[at]
        if not batch.past:
            self.varlen(q, k[at], v[at], starts[0], starts[0], batch.longest[0], batch.longest[0], scaling, out)
            return
        of = self._layers[layer]
        full_k, full_v, few_k, few_v = self.gather(pages, layer, k, v, batch, kept_table, rest_table)
        kinds = [
            (of.full, full_k, full_v, starts[1], batch.longest[1]),
            (of.few, few_k, few_v, starts[2], batch.longest[2]),
        ]
        for heads, some_k, some_v, begin, longest in kinds:
            if len(heads) == q.shape[1]:
                self.varlen(q, some_k, some_v, starts[0], begin, batch.longest[0], longest, scaling, out)
            elif len(heads):
                some = q.index_select(1, heads)
                result = torch.empty_like(some)
                self.varlen(some, some_k, some_v, starts[0], begin, batch.longest[0], longest, scaling, result)
                out.index_copy_(1, heads, result)


def decoding_first(starts: Sequence[int], tokens: int) -> int:
    """How many of the first requests have one new position, or none, as padding has, and a row each.

    starts: [R + 1], the first row of each request in the step's tokens; tokens: its rows, with padding
    """
    many = [new > 1 for new in (end - start for start, end in pairwise(starts))]
    return min(many.index(True) if any(many) else len(many), tokens)


@dataclass
class DeviceStep:
    """What one step computes; every layer reads it, and the first one has it scheduled, in a captured graph as well."""

    decodes: int  # requests at the front with at most one new position; request i has row i of the step's tokens
    lengths: Tensor  # int32 [R], positions of each request once the step is done; 0 = padding
    tables: tuple[Tensor, Tensor]  # int32 [R, blocks] each, the block tables of `kept` and `rest`
    slots: tuple[Tensor, Tensor]  # int64 [tokens] each, of the new positions in `kept` and `rest`; null: not stored
    batches: Sequence[Batch] = ()  # the requests behind the first `decodes`, without those of `others`
    others: Sequence[attention.Step] = ()  # requests that compute generated positions again, a step each
    scheduled: bool = False  # whether a layer has been here

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
        """Store the step's K and V, and write its attention to `out`, which is contiguous; see `attention.attend`."""
        tokens, first = len(self.slots[0]), self.decodes
        paged.store(pages, layer, k[:tokens], v[:tokens], self)
        for step in self.others:  # their pages of codes, before anything reads: requests of one step may share pages
            attention.write(step, layer, pages, k, v)
        if first:
            if not self.scheduled:
                paged.schedule(self.lengths[:first])
                self.scheduled = True
            kept, rest = (table[:first] for table in self.tables)
            paged.attend(pages, layer, q[:first], self.lengths[:first], kept, rest, scaling, out[:first])
        for batch in self.batches:
            paged.prefill(pages, layer, q, k, v, batch, *self.tables, scaling, out)
        for step in self.others:
            attention.attend(step, layer, pages, q, k, v, scaling, out)
