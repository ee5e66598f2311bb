"""A server's step on a GPU over pages of codes, held equal to `eval.serving.attention`.

As in `eval.serving.paged`, of which this has the tables, the launches and the order of a step. What a layer stores is
two launches: all tokens to `rest`, then the pages that they fill to `kept`. What decodes is read by the compressed
cache's kernel in CUDA, `codes.cu`, whose schedule one launch makes for all layers of a step. Where that kernel cannot
run, which `why_triton` says, Triton reads the same pages.
"""

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.attention import codes, schedule, variants
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.attention.launch import FEW, multiprocessors
from leank.eval.cache.attention.readers import AHEAD, EFFORT, FEW_PAGES, MANY_PAGES, SHARED
from leank.eval.cache.attention.schedule import Split
from leank.eval.cache.attention.softmax import LOG2_E
from leank.eval.cache.storage.segment import PAGE
from leank.eval.serving.coded import CodedLayout
from leank.eval.serving.paged import DeviceStep, LayerTables, PagedAttention
from leank.eval.serving.prefill import Batch, Varlen, plain
from leank.precision import GROUP

UNIT = 512  # bytes of pages that count as one in costs


class CodedAttention(PagedAttention):
    """The kernels over the pages of a layout of bits; see `PagedAttention`.

    programs: also of the kernel in CUDA, 0 = so many as fit the GPU's multiprocessors
    """

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
        heads = [head for of_layer in layout.kept.layers for head in of_layer]
        self.of_warp = codes.warp_bytes(*(np.array([getattr(h, of) for h in heads]) for of in ("k_bytes", "v_bytes")))
        self.why_triton = self._why_triton(layout, device, q_heads)
        if self.why_triton is None:
            programs = programs or codes.per_sm(self.of_warp, layout.head_dim, device) * multiprocessors(device)
        super().__init__(layout, device, q_heads, rows, programs, varlen)
        self.page_bytes = layout.kept.bytes
        if self.why_triton is None:
            self._make_tables(device)
            self.compiled = "codes.cu by NVRTC; schedule, write, pack and gather by Triton"
        else:
            self.compiled = (
                f"write, pack, gather and, for minutes, decode by Triton; codes.cu cannot: {self.why_triton}"
            )
        self.variants = variants.variants(layout.codecs[0].model_heads(layout.head_dim), layout.head_dim)
        self.pages = tuple(
            variants.page_bytes(one, layout.head_dim, layout.dtype.itemsize, GROUP, layout.packed)
            for one in self.variants
        )
        self.warps = 8 if self._padded > 16 and 8 * max(self.pages, default=0) < SHARED else 4
        size = self.programs, PAGE, layout.head_dim
        self._ring = tuple(torch.empty(size, dtype=layout.dtype, device=device) for _ in range(2))

    def _why_triton(self, layout: CodedLayout, device: torch.device, q_heads: int) -> str | None:
        """Why `codes.cu` cannot read these pages; None = it does."""
        if (group := q_heads // len(layout.kept.layers[0])) > codes.ROWS:
            return f"it reads up to {codes.ROWS} query heads of a KV head, not {group}"
        if why := codes.why_not(device, layout.dtype, layout.head_dim):
            return why
        if not codes.per_sm(self.of_warp, layout.head_dim, device):
            return f"pages of {sum(self.of_warp):,} bytes do not fit a multiprocessor"
        return None

    def _make_tables(self, device: torch.device) -> None:
        """The tables of the schedule: `templates` and `costs` of `kernels.schedule`, and the schedule of each layer."""
        layout, heads = self.layout, np.array([codec.heads for codec in self.layout.codecs])  # [L, H, columns of BITS]
        templates = np.zeros((*heads.shape[:2], 2, schedule.FIELDS), dtype=np.int64)
        templates[..., Split.HEAD] = np.arange(self.heads)[:, None]
        templates[..., 0, Split.KIND], templates[..., 1, Split.KIND] = schedule.SINK, schedule.PROMPT
        for layer, (of_codes, whole) in enumerate(zip(layout.kept.layers, layout.rest.layers, strict=True)):
            for head, (page, stripes) in enumerate(zip(of_codes, whole, strict=True)):
                starts = [layout.rest.block * of.start for of in (stripes.k, stripes.v)]
                templates[layer, head, 0, [Split.K_START, Split.V_START]] = starts
                templates[layer, head, 1, [Split.K_START, Split.V_START]] = page.start, page.start + page.k_bytes
        templates[..., 1, [Split[part.name] for part in schedule.BITS]] = heads
        pages = np.array([[h.k_bytes + h.v_bytes for h in of_layer] for of_layer in layout.kept.layers])
        cost = np.maximum(pages, codes.effort(heads, layout.head_dim) * codes.BYTES_OF_EFFORT)
        costs = np.zeros((*heads.shape[:2], 2), dtype=np.int32)
        costs[..., 0] = np.where(pages > 0, -(-cost // UNIT), 0)
        costs[..., 1] = 2 * layout.head_dim * layout.dtype.itemsize * codes.ENDS * codes.WARPS // UNIT
        self._templates, self._costs = (torch.from_numpy(x).to(device) for x in (templates, costs))
        lines = 2 * (self.programs + self.rows * self.heads)
        self._schedule = torch.zeros(len(heads), lines, schedule.FIELDS, dtype=torch.int64, device=device)
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def schedule(self, lengths: Tensor) -> None:
        """Make the schedule of all layers, in one launch."""
        import triton

        from leank.eval.serving.kernels import schedule as kernel

        if self.why_triton is not None:
            return
        layers, lines, _ = self._schedule.shape
        kernel.make[(self.programs, layers)](
            *(self._schedule, lengths, self._templates, self._costs, len(lengths), self.programs, lines),
            *(self.layout.sink, self.layout.window),
            H=self.heads,
            HEADS=triton.next_power_of_2(self.heads),
            BATCH=triton.next_power_of_2(self.rows),
            WARPS=codes.WARPS,
            FEW=FEW,
            START=MANY_PAGES.split // UNIT,
            FEW_START=FEW_PAGES.split // UNIT,
            num_warps=1,
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
        """Attention of a decoding step whose schedule has been made; see `PagedAttention.attend`."""
        if self.why_triton is not None:
            return super().attend(pages, layer, q, lengths, kept_table, rest_table, scaling, out)
        self._refuse(len(q))
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        layout, none, index = self.layout, self._none, self._layers[layer].kept[1][None]
        pool = codes.Pool(
            kept_table, rest_table, lengths, pages.stride(0) * pages.element_size(), self.page_bytes, layout.sink,
            layout.window, layout.kept.block, layout.rest.block,
        )  # fmt: skip
        codes.launch(
            self.programs, self._padded, self.of_warp, GROUP, False, self._schedule[layer],
            Layer(pages, pages, index, index, none, none, none, 0, 0, 0, 0),
            Queries(q, none, q.stride(0), q.stride(1), 0, 1, scaling * LOG2_E),
            Results(out, self._part, self._stat, self._done), pool, layout.packed,
        )  # fmt: skip
        return out

    def _tables(self, layer: int, device: torch.device) -> LayerTables:
        layout, codec = self.layout, self.layout.codecs[layer]
        found = variants.variants(codec.model_heads(layout.head_dim), layout.head_dim)
        heads = np.array(codec.heads)
        numbers = torch.from_numpy(variants.numbers(found, heads))
        some = ~layout.empty(layer)
        bands = torch.cat([torch.from_numpy(heads), numbers[:, None], some[:, None]], 1).int()
        effort = torch.tensor([variants.effort(one, layout.head_dim) * EFFORT for one in found] or [0.0])[numbers]
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

        on_gpu, block = self._done.is_cuda, self.layout.kept.block
        return coded.read, banded.Codes(self.variants, self.pages, AHEAD, on_gpu, GROUP, self.layout.packed, block)

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

        numbers = (0, 0, 0, step.decodes, 1)
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
            PACKED=self.layout.packed,
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
            PACKED=self.layout.packed,
            num_warps=8,  # of 4, threads have too few registers for a page's values
        )
