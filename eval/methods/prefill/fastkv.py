"""FastKV (arXiv 2502.01068): above one fixed layer only the tokens go on that the last queries attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from eval.inference.prefill import Prefill, PromptLayer, prefill
from eval.methods.common.slicing import RowPass, check_window, layer_at, slicing, window_and_best, window_scores
from leank_train.common.typed import Count, Positive


@dataclass(frozen=True)
class FastKV(RowPass):
    """Token-selective propagation (section 4.1). budget: tokens that go on up, the window included. layer: the last
    that reads the whole prompt, None = as deep as 15 of 32. window, kernel: last queries that score the tokens before
    them (attention summed over all heads), and average pooling.

    FastKV's compression of each layer's K and V for decoding is SnapKV with its scores summed over the group, from the
    same window: a choice on the tokens axis, with a budget of its own. Prompts of no more tokens than the budget are
    read whole.
    """

    budget: Positive = 2048
    layer: Count | None = None
    window: Positive = 8
    kernel: Positive = 7

    def check(self, config: Any, tokenizer: Any) -> None:
        super().check(config, tokenizer)
        check_window(self.budget, self.window, self.kernel)
        layer_at(self.layer, 15, config)

    def kept_counts(self, config: Any, length: int) -> tuple[list[int], list[int]]:
        whole = layer_at(self.layer, 15, config) + 1
        columns = [length] * whole + [min(length, self.budget)] * (config.num_hidden_layers - whole)
        return columns, columns

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        if ids.shape[1] <= self.budget:
            return prefill(model, ids, None, room, obs_queries)
        last = layer_at(self.layer, 15, model.config.get_text_config(decoder=True))

        def choose(index: int, layer: PromptLayer) -> Tensor | None:
            if index != last:
                return None
            scores = window_scores(layer, self.window, self.kernel)
            return window_and_best(scores, self.budget - self.window, self.window)

        with slicing(model, choose):
            return prefill(model, ids, None, room, max(self.window, obs_queries))
