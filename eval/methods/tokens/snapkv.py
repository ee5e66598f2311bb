"""SnapKV (arXiv 2404.14469): in every head the tokens stay that the prompt's last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.cache.storage.store import Sizes
from eval.inference.observe import received
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.axes import Tokens
from eval.methods.common.selection import budgeted, keep_best, spare
from eval.methods.common.slicing import check_kernel
from leank_train.common.typed import OneOf, Positive

POOLING = {"avg": torch.avg_pool1d, "max": torch.max_pool1d}
GROUP = ("mean", "max")


@dataclass(frozen=True)
class SnapKV(Tokens):
    """budget: tokens of the prompt that a KV head keeps in all. queries: last ones that are observed, and always stay.
    kernel, pooling: over how many neighbours a score is pooled, and how (avg or max). group: how the scores of a KV
    head's query heads become one (mean or max).

    score_j = pool_j(sum over the observed queries t of softmax(q_t K^T / sqrt(D))_j), section 4; the observed tokens
    are not scored. The authors' code keeps its own tokens for every query head, repeating K and V; here a KV head has
    one set, by the mean of its group as in kvpress (a sum chooses the same). Sink and window of the cache stay besides
    and count as part of the budget; sink 0 and a window of `queries` tokens are the paper's.
    """

    free = "budget"
    budget: Positive = 1024
    queries: Positive = 32
    kernel: Positive = 7
    pooling: Annotated[str, OneOf(*POOLING)] = "avg"
    group: Annotated[str, OneOf(*GROUP)] = "mean"

    @property
    def obs_queries(self) -> int:  # type: ignore[override]
        return self.queries

    def check(self, config: Any, tokenizer: Any) -> None:
        check_kernel(self.kernel)

    def check_sizes(self, sizes: Sizes) -> None:
        spare(self.budget, self._protected(sizes))

    def keep_mask(self, prefill: Prefill, config: Any, sizes: Sizes) -> list[Tensor | None]:
        sizes = self._protected(sizes)
        return keep_best(prefill, sizes, self.counts(prefill, sizes), self.scores)

    def kept_counts(self, config: Any, columns: list[int], sizes: Sizes) -> np.ndarray:
        return budgeted(self.budget, config, sizes)

    def counts(self, prefill: Prefill, sizes: Sizes) -> list[int | Tensor]:
        """Of every layer how many tokens stay between sink and window, in all rows or [B]."""
        return [spare(self.budget, sizes)] * len(prefill.layers)

    def scores(self, layer: PromptLayer, real: Tensor | None) -> Tensor:
        """Pooled attention that each token receives from the observed queries, [B, H, T]; theirs is 0."""
        assert layer.queries is not None
        queries = layer.queries[:, :, -self.queries :]
        attention = received(queries, layer.keys, real=real, scaling=layer.scaling, softmax=layer.softmax)
        attention = attention[..., : -queries.shape[2]]
        pooled = POOLING[self.pooling](attention, self.kernel, 1, self.kernel // 2)
        grouped = pooled.unflatten(1, (layer.keys.shape[1], -1))
        return pad(grouped.mean(2) if self.group == "mean" else grouped.amax(2), (0, queries.shape[2]))

    def _protected(self, sizes: Sizes) -> Sizes:
        """The window with all tokens that are observed."""
        return replace(sizes, window=max(sizes.window, self.queries))
