"""FastKV (arXiv 2502.01068, section 4.1): above one layer, only the tokens go on that the last queries attended to."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Budget, Kernel
from leank.eval.methods.common.slicing import (
    POOLING,
    RowPass,
    check_window,
    layer_at,
    slicing,
    window_and_best,
    window_scores,
)
from leank.typed import Count, OneOf, Positive


@method("fastkv")
@dataclass(frozen=True)
class FastKV(RowPass):
    """Token-selective propagation: layer `layer` selects the tokens that the layers above it read.

      score_j = sum over all heads of pool_j(sum over the last `window` queries t of softmax(q_t K^T / sqrt(D))_j)

    The window and the `budget` - `window` tokens of the highest score go on, at their positions in the prompt. Prompts
    of no more tokens than the budget are read whole. FastKV's compression of each layer's K and V for decoding is
    SnapKV with the same window: that is a choice on the tokens axis, with a budget of its own.

    Deviations
    - Pooling averages and the budgets are fixed by default. The authors' scripts pool by maximum, and their budgets are
      shares of the prompt, 0.2 for propagation and 0.1 for decoding: `fastkv_rates`.
    - The layer for another number of layers than 32 is proportional; ASL's experiments use layer 14 for Qwen's 28.
    """

    budget: Budget = 2048  # tokens that go on up, the window included. A share is rounded down.
    layer: Count | None = None  # last layer that reads the whole prompt; None is as deep as layer 15 of 32
    window: Positive = 8  # last queries, which score the tokens before them
    kernel: Kernel = 7  # neighbours over which a score is pooled
    pooling: Annotated[str, OneOf(*POOLING)] = "avg"  # how a head's scores are pooled

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        check_window(self.budget, self.window)
        layer_at(self.layer, 15, config)

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        whole = layer_at(self.layer, 15, config) + 1
        columns = [length] * whole + [min(length, self._passed(length))] * (config.num_hidden_layers - whole)
        return columns, columns

    def _passed(self, length: int) -> int:
        """Tokens of a prompt that go on up."""
        return self.budget if isinstance(self.budget, int) else max(self.window + 1, int(self.budget * length))

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        passed = self._passed(ids.shape[1])
        if ids.shape[1] <= passed:
            return prefill(model, ids, None, room, obs_queries)
        last = layer_at(self.layer, 15, model.config.get_text_config(decoder=True))

        def choose(index: int, layer: PromptLayer) -> Tensor | None:
            if index != last:
                return None
            scores = window_scores(layer, self.window, self.kernel, self.pooling)
            return window_and_best(scores, passed - self.window, self.window)

        with slicing(model, choose):
            return prefill(model, ids, None, room, max(self.window, obs_queries))
