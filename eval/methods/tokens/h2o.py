"""H2O (arXiv 2306.14048): heavy hitters stay, the tokens that have received the most attention from all queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from eval.cache.storage.eviction import SCORE, HeavyHitters
from eval.cache.storage.store import Sizes
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.axes import Tokens
from eval.methods.common.selection import budgeted, keep_best, spare
from eval.methods.held import Held
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class H2O(Tokens):
    """budget: tokens of the prompt that a KV head keeps in all. evict: whether it holds while decoding, too; else every
    new token stays, and the choice may be combined with bits and reads.

    score_j = sum over all queries t >= j of softmax(q_t K^T / sqrt(D))_j, section 4, added up over the query heads of a
    KV head. Recent tokens are the cache's window, heavy hitters what the budget leaves beside it (and the sink, which
    the paper does not have): sink=0 and a window of half the budget are the paper's half and half. The paper evicts
    after every token, of the prompt as well; here after the whole prompt, as public code does, so that no early token
    is lost to the prompt's own beginning, and then whenever `flush` tokens have left the window.
    """

    column_sums, free = True, "budget"
    budget: Positive = 1024
    evict: bool = True

    def check_sizes(self, sizes: Sizes) -> None:
        spare(self.budget, sizes)

    def keep_mask(self, prefill: Prefill, config: Any, sizes: Sizes) -> list[Tensor | None]:
        return keep_best(prefill, sizes, [spare(self.budget, sizes)] * len(prefill.layers), self.scores)

    def eviction(self, layer: PromptLayer, config: Any, sizes: Sizes) -> HeavyHitters | None:
        return HeavyHitters(spare(self.budget, sizes)) if self.evict else None

    def kept_counts(self, config: Any, columns: list[int], sizes: Sizes) -> np.ndarray:
        return budgeted(self.budget, config, sizes)

    def extra_bytes(self, held: Held) -> float:
        return SCORE * float((held.ends + held.middle).sum()) if self.evict else 0

    @staticmethod
    def scores(layer: PromptLayer, real: Tensor | None) -> Tensor:
        """Attention that each token has received, [B, H, T]."""
        assert layer.column_sums is not None
        return layer.column_sums
