"""A server's step on a GPU over pages of codes, held equal to `eval.serving.attention`.

As in `eval.serving.paged`, of which this has the tables, the launches and the order of a step. What a layer stores is
two launches: all tokens to `rest`, then the pages that they fill to `kept`.
"""

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.attention import variants
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.readers import AHEAD, EFFORT, SHARED
from leank.eval.cache.storage.segment import PAGE
from leank.eval.serving.coded import CodedLayout
from leank.eval.serving.paged import DeviceStep, LayerTables, PagedAttention
from leank.eval.serving.prefill import Batch, Varlen, plain

UNIT = 512  # bytes of pages that count as one in costs


class CodedAttention(PagedAttention):
    """The kernels over the pages of a layout of bits; see `PagedAttention`."""

    head_dims = HEAD_DIMS["codes"]
    start = 96
    layout: CodedLayout

    def __init__(
        self,
        layout: CodedLayout,
        device: torch.device,
        q_heads: int,
        rows: int = 256,
        programs: int = 0,
        varlen: Varlen = plain,
    ) -> None:
        super().__init__(layout, device, q_heads, rows, programs, varlen)
        self.page_bytes = layout.kept.bytes
        self.variants = variants.variants(layout.codecs[0].model_heads(layout.head_dim), layout.head_dim)
        self.pages = tuple(variants.page_bytes(one, layout.head_dim, layout.dtype.itemsize) for one in self.variants)
        self.warps = 8 if self._padded > 16 and 8 * max(self.pages) < SHARED else 4
        size = self.programs, PAGE, layout.head_dim
        self._ring = tuple(torch.empty(size, dtype=layout.dtype, device=device) for _ in range(2))

    def _tables(self, layer: int, device: torch.device) -> LayerTables:
        layout, codec = self.layout, self.layout.codecs[layer]
        found = variants.variants(codec.model_heads(layout.head_dim), layout.head_dim)
        heads = np.array(codec.heads)
        numbers = torch.from_numpy(variants.numbers(found, heads))
        some = ~layout.empty(layer)
        bands = torch.cat([torch.from_numpy(heads), numbers[:, None], some[:, None]], 1).int()
        effort = torch.tensor([variants.effort(one, layout.head_dim) * EFFORT for one in found])[numbers]
        pages = torch.tensor([head.k_bytes + head.v_bytes for head in layout.kept.layers[layer]])
        middle = torch.where(some, (torch.maximum(pages, effort) / UNIT).ceil(), 0)
        ends = torch.full_like(middle, 2 * layout.head_dim * PAGE * layout.dtype.itemsize // UNIT)
        rest = layout.rest.table(layer), layout.rest.channels(layer)
        tables = layout.table(layer), layout.order(layer), *rest, bands, torch.stack([middle, ends], -1).int()
        on_device = [x.to(device) for x in (*tables, *self._sight(layer))]
        return LayerTables((on_device[0], on_device[1]), (on_device[2], on_device[3]), True, *on_device[4:])

    def _reader(self) -> tuple[object, object]:
        from leank.eval.cache.attention.kernels import banded
        from leank.eval.serving.kernels import coded

        on_gpu = self._done.is_cuda
        return coded.read, banded.Codes(self.variants, self.pages, AHEAD, on_gpu, BLOCK=self.layout.kept.block)

    def store(self, pages: Tensor, layer: int, k: Tensor, v: Tensor, step: DeviceStep) -> None:
        from leank.eval.serving.kernels import coded

        of, block = self._layers[layer], self.layout.rest.block
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        coded.write[k.shape[:2]](
            *(pages, k, v, step.slots[1], of.rest[0], pages.stride(0), *k.stride()[:2], *v.stride()[:2]),
            D=self.layout.head_dim,
            BLOCK=block,
        )
        if step.decodes:
            self._pack(pages, of, k, v, step, None)
        for batch in step.batches:
            self._pack(pages, of, k, v, step, batch)

    def _pack(
        self, pages: Tensor, of: LayerTables, k: Tensor, v: Tensor, step: DeviceStep, batch: Batch | None
    ) -> None:
        """Pack the pages that a batch fills, None = the requests that decode."""
        from leank.eval.serving.kernels import coded

        numbers = (1, 0, 0, step.decodes, 1)
        if batch is not None:
            numbers = (
                batch.requests + 1,
                batch.request,
                batch.rows.start,
                batch.requests,
                batch.longest[0] // PAGE + 1,
            )
        coded.pack[(self.programs,)](
            *(pages, pages.view(torch.uint8), k, v, *self._ring, step.lengths if batch is None else batch.plan),
            *(step.lengths, *step.tables, *of.kept, of.columns, of.rest[0]),
            *(pages.stride(0), self.page_bytes, *k.stride()[:2], *v.stride()[:2]),
            *(*(table.stride(0) for table in step.tables), *numbers, self.programs, self.layout.sink),
            H=self.heads,
            D=self.layout.head_dim,
            BLOCK=self.layout.kept.block,
            REST_BLOCK=self.layout.rest.block,
            CHUNKS=batch is not None,
        )

    def _gather(
        self,
        grid: tuple[int, int, int],
        of: LayerTables,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        tables: tuple[Tensor, Tensor],
        numbers: tuple[int, ...],
    ) -> None:
        from leank.eval.serving.kernels import coded

        pages, *others = tensors
        coded.gather[grid](
            *(pages, pages.view(torch.uint8), *others, *tables, *of.kept, of.columns, of.rest[0], of.place),
            *(pages.stride(0), self.page_bytes, *strides, *(table.stride(0) for table in tables), *numbers),
            D=self.layout.head_dim,
            BLOCK=self.layout.kept.block,
            REST_BLOCK=self.layout.rest.block,
            num_warps=8,  # of 4, threads have too few registers for a page's values
        )
