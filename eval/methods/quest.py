"""Quest (arXiv 2406.10774): a query reads whole pages of the middle, those whose keys could score highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.cache.store import Sizes, Store
from eval.methods.axes import Reads
from eval.methods.selection import spare

Bounds = tuple[Tensor, Tensor]  # smallest and largest key of every page, [pages, channels]


@dataclass(frozen=True)
class Quest(Reads):
    """budget: tokens that a query head reads in all, sink and window included. page: tokens of a page. dense_layers:
    first layers that read everything.

    A page's bound on q k is the sum over channels of max(q_c min_c, q_c max_c) (Algorithm 1); each query head reads the
    floor((budget - sink - window) / page) pages of the highest bound, at least one. On pruned channels the bounds and
    what is read have the kept ones alone. All of K and V stay in memory, and the bounds (2 / page of the middle's K)
    come on top. Deviation: sink and window are always read, while the authors' code has at least three pages of any
    part. Plain PyTorch reads the other pages too and masks them: answers are Quest's, time is not.
    """

    budget: int = 1024
    page: int = 16
    dense_layers: int = 2

    def check(self, config: Any, tokenizer: Any) -> None:
        for name, least in (("budget", 1), ("page", 1), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def check_sizes(self, sizes: Sizes) -> None:
        spare(self.budget, sizes)

    def of_layer(self, index: int, config: Any) -> Quest | None:
        return None if index < self.dense_layers else self

    def start(self, store: Store) -> Pages:
        """The bounds of one sealed layer."""
        return Pages(store, self.page, max(1, spare(self.budget, store.sizes) // self.page))


class Pages:
    """The bounds of one layer's middle, per row and KV head; `most` pages are read by a query head."""

    def __init__(self, store: Store, page: int, most: int):
        self.page, self.most = page, most
        self.moved(store)

    def moved(self, store: Store) -> None:
        """Bounds of the middle as it is now."""
        self.bounds = [
            [self._bounds(torch.cat([part.read(row, head)[0] for part in (store.prompt, store.tail)]))
             for head in range(store.ring_k.shape[1])]
            for row in range(len(store.seen))
        ]  # fmt: skip

    def _bounds(self, k: Tensor) -> Bounds:
        """Of keys k [tokens, channels]; the last page may be partly filled."""
        filled = torch.cat([k, k[-1:].expand(-len(k) % self.page, -1)])
        pages = filled.view(len(filled) // self.page, self.page, k.shape[1])
        return pages.amin(1), pages.amax(1)

    def visible(self, row: int, head: int, q: Tensor, k: Tensor, channels: Tensor) -> Tensor:
        low, high = (bound.to(q.dtype) for bound in self.bounds[row][head])
        bound = torch.maximum(q[..., None, :] * low, q[..., None, :] * high).sum(-1)  # [G, Q, pages]
        chosen = bound.topk(min(self.most, bound.shape[-1])).indices
        pages = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, chosen, True)
        return pages.repeat_interleave(self.page, -1)[..., : len(k)]

    def tensors(self) -> dict[str, Tensor]:
        """Every bound held, by row, head and end."""
        return {
            f"{row}.{head}.{end}": bound
            for row, heads in enumerate(self.bounds)
            for head, both in enumerate(heads)
            for end, bound in zip(("low", "high"), both, strict=True)
        }
