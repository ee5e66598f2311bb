"""Decode attention over pages: the slow, obvious form, and the launch of the Triton kernel that is held equal to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eval.serving.layout import Group, PageLayout

TILE = 64  # tokens that a program reads at a time
PER_SM = 8  # programs per multiprocessor that a launch aims at, so that ragged heads even out
MERGE = 128  # lines of partial results that a merge reads at a time


def attend(
    layout: PageLayout,
    layer: int,
    pages: Tensor,
    q: Tensor,
    lengths: Tensor,
    kept_table: Tensor,
    rest_table: Tensor,
    scaling: float,
) -> Tensor:
    """softmax(q K_sink, q_kept K_middle, q K_window) V of one decoding step, one row at a time.

    pages: [blocks, page_columns]
    q: [B, Hq, D], the query of each row's last token, whose own K and V are in the pages
    lengths: int [B], tokens of each row, that one included; 0 gives zeros
    kept_table, rest_table: int [B, blocks of a row], the pages of each group
    scaling: factor of the logits

    Returns [B, Hq, D] in q's dtype, computed in at least fp32.
    """
    out = torch.zeros_like(q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    some = [head.k.count > 0 for head in layout.kept.layers[layer].heads]  # heads that have a middle
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        position = torch.arange(length, device=q.device)
        whole = (position < layout.sink) | (position >= layout.whole_from(length - 1))
        k, v = _read(layout.kept, layer, pages, kept_table[row], position, layout.head_dim)
        rest = _read(layout.rest, layer, pages, rest_table[row], position[whole], layout.head_dim)
        k[whole] += rest[0]
        v[whole] += rest[1]
        group = q.shape[1] // len(some)
        for head, has_middle in enumerate(some):
            seen = slice(None) if has_middle else whole
            heads = slice(head * group, (head + 1) * group)
            logits = q[row, heads].to(dtype) @ k[seen, head].to(dtype).T * scaling
            out[row, heads] = (logits.softmax(-1) @ v[seen, head].to(dtype)).to(q.dtype)
    return out


def _read(
    group: Group, layer: int, pages: Tensor, table: Tensor, position: Tensor, head_dim: int
) -> tuple[Tensor, Tensor]:
    slots = table[position // group.block].long() * group.block + position % group.block
    return group.read(pages, layer, slots, head_dim)


def splits_of(weights: np.ndarray, programs: int) -> np.ndarray:
    """How the heads of a row are cut among about `programs` programs, each head by its bytes.

    weights: [H], bytes of a token of the middle

    Returns int32 [lines, 4]: head, split, splits of the head, and the head's first line.
    """
    share = np.maximum(1, np.rint(programs * weights / max(1, weights.sum()))).astype(int)
    first = np.cumsum(share) - share
    return np.array([(h, s, n, first[h]) for h, n in enumerate(share) for s in range(n)], dtype=np.int32)


@dataclass
class _Layer:
    """The tables of one layer on the device; `weights` [H] are the kept columns of each head."""

    kept: tuple[Tensor, Tensor]
    rest: tuple[Tensor, Tensor]
    weights: np.ndarray


class PagedAttention:
    """The kernel over the pages of one layout.

    layout: whose pages are read
    device: of the pages
    programs: that a launch aims at, 0 = PER_SM per multiprocessor
    """

    def __init__(self, layout: PageLayout, device: torch.device, programs: int = 0) -> None:
        self.layout = layout
        self.programs = programs or PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._layers = [self._tables(layer, device) for layer in range(len(layout.kept.layers))]
        self._work: dict[tuple[int, int], Tensor] = {}  # (layer, rows) -> lines
        self._every = torch.arange(layout.head_dim, dtype=torch.int32, device=device)
        self._partials, self._done = (torch.zeros(0, dtype=t, device=device) for t in (torch.float32, torch.int32))

    def _tables(self, layer: int, device: torch.device) -> _Layer:
        groups = self.layout.kept, self.layout.rest
        kept, rest = ((g.table(layer).to(device), g.channels(layer).to(device)) for g in groups)
        heads = self.layout.kept.layers[layer].heads
        return _Layer(kept, rest, np.array([head.k.width + head.v.width for head in heads]))

    def write(self, pages: Tensor, layer: int, k: Tensor, v: Tensor, kept_slots: Tensor, rest_slots: Tensor) -> None:
        """Put tokens k, v [n, H, D] of a layer into both groups; the reference is `Group.write` of each.

        kept_slots, rest_slots: int64 [n], block * group.block + token; a slot of the null block stores nothing
        """
        from eval.serving import paged_kernel

        of = self._layers[layer]
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        paged_kernel.write[k.shape[:2]](
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
    ) -> Tensor:
        """Attention of one decoding step in one launch; parameters and result are those of `attend`.

        lengths and the tables are int32 on the device, and may change between replays of a captured launch.
        """
        import triton

        from eval.serving import paged_kernel

        of, layout = self._layers[layer], self.layout
        batch, q_heads, dim = q.shape
        heads = len(of.weights)
        group = q_heads // heads
        rows = triton.next_power_of_2(group)
        work = self._lines(layer, batch)
        partials, stats, done = self._scratch(batch * len(work) * rows, dim, batch * heads)
        out = torch.empty(batch, q_heads, dim, dtype=q.dtype, device=q.device)
        paged_kernel.decode[(len(work), batch)](
            *(pages, q, out, lengths, kept_table, rest_table, work, *of.kept, *of.rest, partials, stats, done),
            *(scaling * 1.4426950408889634, pages.stride(0), q.stride(0), q.stride(1)),
            *(kept_table.stride(0), rest_table.stride(0), of.kept[1].shape[1], of.rest[1].shape[1]),
            *(layout.sink, layout.window, len(work)),
            H=heads,
            GROUP=group,
            D=dim,
            TILE=TILE,
            M=max(16, rows),
            ROWS=rows,
            MERGE_LINES=max(1, MERGE // rows),
            KEPT_BLOCK=layout.kept.block,
            REST_BLOCK=layout.rest.block,
            num_warps=4,
            num_stages=3,
        )
        return out

    def _lines(self, layer: int, batch: int) -> Tensor:
        """The work of a row, kept for each number of rows: a captured launch must find it where it was."""
        found = self._work.get((layer, batch))
        if found is None:
            lines = splits_of(self._layers[layer].weights, -(-self.programs // batch))
            found = self._work[layer, batch] = torch.from_numpy(lines).to(self._every.device)
        return found

    def _scratch(self, lines: int, dim: int, counters: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial results [lines, D], their (max, sum) [lines, 2], and counters, which a launch leaves at zero."""
        if self._partials.numel() < lines * (dim + 2):
            self._partials = self._partials.new_empty(lines * (dim + 2))
        if self._done.numel() < counters:
            self._done = self._done.new_zeros(counters)
        return self._partials, self._partials[lines * dim :], self._done
