"""Quest (arXiv 2406.10774, Algorithm 1): a query reads whole pages, those whose keys could score highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from leank.eval.cache.attention.batched import PartLayout
from leank.eval.cache.attention.ranking import Bounds, Ranking
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.methods.axes import Held, Reads, method
from leank.eval.methods.common.scored import middle_budget
from leank.typed import Count, Positive


@method("quest")
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
    - Plain PyTorch, which runs where the Triton kernel cannot, masks the other pages: time is not Quest's.
    """

    budget: Positive = 1024  # tokens that a query head reads in all, sink and window included
    page: Positive = 16  # tokens of a page
    dense_layers: Count = 2  # first layers that read everything

    def check_sizes(self, sizes: Sizes) -> None:
        middle_budget(self.budget, sizes)

    def of_layer(self, index: int) -> Self | None:
        return None if index < self.dense_layers else self

    def extra_bytes(self, held: Held) -> float:
        bounds = 2 * -(-held.middle // self.page) * held.k
        return held.itemsize * float(bounds[self.dense_layers :].sum())

    def start(self, store: Store) -> Pages:
        """The bounds of one compressed layer."""
        return Pages(store, self.page, max(1, middle_budget(self.budget, store.sizes) // self.page))


class Pages:
    """The pages of a compressed layer's middle, ranked by their bounds; most: how many a query head reads."""

    def __init__(self, store: Store, page: int, most: int) -> None:
        self.bounds = Bounds(store, page)
        self.ranking = Ranking(most, self.bounds)

    def moved(self, store: Store) -> None:
        self.bounds.update(store)

    def sees(self, q: Tensor, keys: list[Tensor], layout: PartLayout) -> Tensor:
        bound = self.bounds.highest(q)
        chosen = bound.topk(min(self.ranking.most, bound.shape[-1])).indices
        read = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, chosen, True)
        of_token = (layout.token() // self.bounds.page).clamp(max=bound.shape[-1] - 1)
        return read.gather(-1, of_token[:, None].expand(-1, q.shape[1], -1))

    def tensors(self) -> dict[str, Tensor]:
        return self.bounds.tensors()
