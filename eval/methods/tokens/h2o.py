"""H2O (arXiv 2306.14048, section 4): the tokens that have received the most attention from all queries stay."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Evicting


@method("h2o")
@dataclass(frozen=True)
class H2O(Evicting):
    """Every KV head keeps the recent tokens and its heavy hitters.

      score_j = sum over all queries t >= j of softmax(q_t K^T / sqrt(D))_j        (summed over the group's query heads)

    Recent tokens are the cache's window. Heavy hitters are what the budget leaves after window and sink; the paper has
    no sink. sink=0 and a window of half the budget are the paper's half and half.

    Deviation: the paper evicts after every token, those of the prompt as well. Here eviction follows the whole prompt,
    as in public code, so that no early token is lost to the prompt's own beginning, and then happens whenever `flush`
    tokens have left the window.
    """

    column_sums = True

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        assert layer.column_sums is not None
        return layer.column_sums

    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> HeavyHitters:
        return HeavyHitters(heavy)
