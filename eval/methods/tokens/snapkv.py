"""SnapKV (arXiv 2404.14469, section 4): in every head the tokens that the prompt's last queries attend to stay."""

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Kernel, Scored
from leank.eval.methods.common.slicing import POOLING
from leank.typed import OneOf, Positive

GROUP = ("mean", "max")


@method("snapkv")
@dataclass(frozen=True)
class SnapKV(Scored):
    """Every KV head keeps the observed tokens and those with the highest pooled attention.

      score_j = pool_j(sum over the observed queries t of softmax(q_t K^T / sqrt(D))_j)

    sink=0 and a window of `queries` tokens are the paper's.

    Deviations
    - The authors' code keeps separate tokens for every query head, repeating K and V. Here a KV head has one set, by
      the mean of its group as in kvpress; a sum chooses the same.
    - Pooling averages by default. The authors' LongBench settings pool by maximum over 7, and so do ThinK and IAP:
      `snapkv_max`. Every query head is pooled by itself.
    """

    queries: Positive = 32  # last queries that are observed; their tokens always stay
    kernel: Kernel = 7  # neighbours over which a score is pooled
    pooling: Annotated[str, OneOf(*POOLING)] = "avg"  # how a score is pooled
    group: Annotated[str, OneOf(*GROUP)] = "mean"  # how the scores of a KV head's query heads become one

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        """Pooled attention that each token receives from the observed queries, [B, H, T]; theirs is 0."""
        assert layer.queries is not None
        queries = layer.queries[:, :, -self.queries :]
        attention = received(queries, layer.keys, real=real, scaling=layer.scaling, softmax=layer.softmax)
        attention = attention[..., : -queries.shape[2]]
        if attention.shape[-1]:  # a prompt of observed queries alone has nothing to pool
            attention = POOLING[self.pooling](attention, self.kernel, 1, self.kernel // 2)
        grouped = attention.unflatten(1, (layer.keys.shape[1], -1))
        return pad(grouped.mean(2) if self.group == "mean" else grouped.amax(2), (0, queries.shape[2]))

    def protected(self, sizes: Sizes) -> Sizes:
        """Sink and window; the window with all tokens that are observed."""
        return replace(sizes, window=max(sizes.window, self.queries))
