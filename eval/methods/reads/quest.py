"""Quest: a query reads whole pages of the middle, those whose keys could score highest.

"Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv 2406.10774, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eval.cache.attention.batched import layout_of
from eval.cache.storage.middle import Columns
from eval.cache.storage.store import Sizes, Store
from eval.cache.storage.upload import upload
from eval.methods.axes import Reads
from eval.methods.common.selection import middle_budget
from eval.methods.held import Held
from leank_train.common.typed import Count, Positive


@dataclass(frozen=True)
class Quest(Reads):
    """Each query head reads the pages of the highest upper bound on q k.

      bound of a page = sum over channels c of max(q_c min_c, q_c max_c)        (Algorithm 1)

    min_c and max_c are over the keys of the page. floor((budget - sink - window) / page) pages are read, at least one.
    On pruned channels, the bounds and what is read have the kept ones alone. All of K and V stay in memory, and the
    bounds, 2 / page of the middle's K, come on top.

    Deviations
    - Sink and window are always read; the authors' code reads at least three pages of any part. The window may hold up
      to `flush` tokens more than its size, beyond the budget.
    - Plain PyTorch reads the other pages too and masks them: answers are Quest's, time is not.

    Settings
    budget: int, tokens, default 1024: tokens that a query head reads in all, sink and window included.
    page: int, tokens, default 16: size of a page.
    dense_layers: int, default 2: first layers that read everything.
    """

    budget: Positive = 1024
    page: Positive = 16
    dense_layers: Count = 2

    def check_sizes(self, sizes: Sizes) -> None:
        middle_budget(self.budget, sizes)

    def of_layer(self, index: int, config: PreTrainedConfig) -> Quest | None:
        return None if index < self.dense_layers else self

    def extra_bytes(self, held: Held) -> float:
        bounds = 2 * -(-held.middle // self.page) * held.k
        return held.itemsize * float(bounds[self.dense_layers :].sum())

    def start(self, store: Store) -> Pages:
        """The bounds of one sealed layer."""
        return Pages(store, self.page, max(1, middle_budget(self.budget, store.sizes) // self.page))


class Pages:
    """The bounds of one layer's middle, per row and KV head.

    store: Store: the sealed layer.
    page: int, tokens: size of a page.
    most: int: how many pages a query head reads.

    `both` [2, n] holds the smallest and the largest key of every page, one head after the other, channel by channel.
    `table` [3, X, 1, 1] holds each head's first bound, its number of pages and its number of channels.
    """

    def __init__(self, store: Store, page: int, most: int) -> None:
        self.page, self.most = page, most
        self.moved(store)

    def moved(self, store: Store) -> None:
        """Bounds of the middle as it is now; the last page may be partly filled."""
        layout, middle = layout_of(store), store.prompt.length + store.tail.length
        self.pages, self.channels = -(-middle // self.page), store.channels.count
        size = (self.pages * self.channels).reshape(-1)
        self.first = (np.cumsum(size) - size).reshape(middle.shape)
        of_heads = np.stack([x.reshape(-1, 1, 1) for x in (self.first, self.pages, self.channels)])
        self.table = upload(of_heads, store.seen_dev.device)
        if not layout.parts:
            self.both = store.ring_k.new_empty(2, 0)
            return
        keys = torch.cat([part.keys(store.ring_k.dtype) for part in layout.parts], -1)  # [X, C, N]
        token = torch.arange(int(self.pages.max()) * self.page, device=keys.device)
        filled = layout.column(torch.minimum(token, layout.middle - 1).clamp(min=0))  # past the end the last again,
        filled = filled.clamp(max=keys.shape[-1] - 1)  # anything in heads without a middle
        pages = keys.gather(-1, filled[:, None].expand(-1, keys.shape[1], -1)).unflatten(-1, (-1, self.page))
        channel, page = (torch.arange(n, device=keys.device) for n in pages.shape[1:3])
        there = (channel[:, None] < self.table[2]) & (page < self.table[1])
        self.both = torch.stack([pages.amin(-1)[there], pages.amax(-1)[there]])

    def bounds(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest key of every page of one head, [pages, channels]."""
        first, pages, channels = (int(n[row, head]) for n in (self.first, self.pages, self.channels))
        low, high = (x[first : first + pages * channels].view(channels, pages).T for x in self.both)
        return low, high

    def visible(self, row: int, head: int, q: Tensor, k: Tensor, channels: Tensor) -> Tensor:
        low, high = (bound.to(q.dtype) for bound in self.bounds(row, head))
        bound = torch.maximum(q[..., None, :] * low, q[..., None, :] * high).sum(-1)  # [G, Q, pages]
        chosen = bound.topk(min(self.most, bound.shape[-1])).indices
        pages = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, chosen, True)
        return pages.repeat_interleave(self.page, -1)[..., : len(k)]

    def sees(self, q: Tensor, keys: list[Tensor], layout: Columns) -> Tensor:
        first, pages, _ = self.table
        channel, page = (torch.arange(n, device=q.device) for n in (q.shape[-1], int(self.pages.max())))
        at = first + channel[:, None] * pages + page  # another head's where this one has none: hidden, or times zero
        low, high = self.both[:, at.clamp(max=self.both.shape[1] - 1)].to(q.dtype)  # each [X, C, pages]
        bound = torch.baddbmm(torch.bmm(q.clamp(min=0), high), q.clamp(max=0), low)  # what the larger products add to
        bound = bound.masked_fill(page >= pages, -torch.inf)  # [X, R, pages]
        chosen = bound.topk(min(self.most, len(page))).indices
        read = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, chosen, True)
        of_token = (layout.token() // self.page).clamp(max=len(page) - 1)
        return read.gather(-1, of_token[:, None].expand(-1, q.shape[1], -1))

    def tensors(self) -> dict[str, Tensor]:
        """All bounds, and where each head's are."""
        return {"bounds": self.both, "table": self.table}
