"""TOVA (arXiv 2401.06104, section 3.2): the tokens that the last query attends to, the same in all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.segment import Segment
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Evicting


@method("tova")
@dataclass(frozen=True)
class TOVA(Evicting):
    """A layer keeps the tokens with the largest attention of the last query, averaged over all its heads.

      score_j = mean over query heads of softmax(q_T K^T / sqrt(D))_j

    While decoding, the tokens with the least attention of the newest query leave.

    Deviations
    - The paper evicts one token per step, in the prompt as well. Here the prompt is cut once, as in kvpress, and then
      tokens leave whenever `flush` tokens have left the window.
    - The paper protects no token. sink=0 and a window of one flush are closest.
    """

    @property
    def obs_queries(self) -> int:
        return 1

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        assert layer.queries is not None
        last = layer.queries[:, :, -1:]
        attention = received(last, layer.keys, real=real, scaling=layer.scaling, softmax=layer.softmax)
        return attention.mean(1, keepdim=True).expand(-1, layer.keys.shape[1], -1)

    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> LastQuery:
        return LastQuery(heavy)


class LastQuery(HeavyHitters):
    """The tokens of a layer's middle with the largest attention of the newest query stay, the same in all heads."""

    decay = 0.0

    def ranking(self, prompt: Segment, tail: Segment, sink: int) -> Tensor:
        scores = self.scores
        if not (prompt.length + tail.length).all():  # a head without channels has no middle
            scores = scores * (prompt.length_dev + tail.length_dev > 0)[..., None]
        return scores.sum(1, keepdim=True).expand_as(scores)
