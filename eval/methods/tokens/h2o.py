"""H2O: the tokens that have received the most attention from all queries stay.

"H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv 2306.14048, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from eval.cache.storage.eviction import SCORE, HeavyHitters
from eval.cache.storage.store import Sizes
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.axes import Tokens
from eval.methods.common.selection import keep_highest, middle_budget, same_in_every_head
from eval.methods.held import Held
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class H2O(Tokens):
    """Every KV head keeps the recent tokens and its heavy hitters.

      score_j = sum over all queries t >= j of softmax(q_t K^T / sqrt(D))_j        (summed over the group's query heads)

    Recent tokens are the cache's window. Heavy hitters are what the budget leaves after window and sink; the paper has
    no sink. sink=0 and a window of half the budget are the paper's half and half.

    Deviation: the paper evicts after every token, those of the prompt as well. Here eviction follows the whole prompt,
    as in public code, so that no early token is lost to the prompt's own beginning, and then happens whenever `flush`
    tokens have left the window.

    Settings
    budget: int, tokens, default 1024: tokens of the prompt that a KV head keeps in all, sink and window included.
    evict: bool, default True: whether the budget also holds while decoding. If not, every new token stays, and the
      choice may be combined with bits and reads.
    """

    column_sums, free = True, "budget"
    budget: Positive = 1024
    evict: bool = True

    def check_sizes(self, sizes: Sizes) -> None:
        middle_budget(self.budget, sizes)

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        return keep_highest(prefill, sizes, [middle_budget(self.budget, sizes)] * len(prefill.layers), self.scores)

    def eviction(self, layer: PromptLayer, config: PreTrainedConfig, sizes: Sizes) -> HeavyHitters | None:
        return HeavyHitters(middle_budget(self.budget, sizes)) if self.evict else None

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray:
        return same_in_every_head(self.budget, config, sizes)

    def extra_bytes(self, held: Held) -> float:
        return SCORE * float((held.ends + held.middle).sum()) if self.evict else 0

    @staticmethod
    def scores(layer: PromptLayer, real: Tensor | None) -> Tensor:
        """Attention that each token has received, [B, H, T]."""
        assert layer.column_sums is not None
        return layer.column_sums
