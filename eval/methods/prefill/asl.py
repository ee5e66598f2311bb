"""ASL: tokens are dropped above the layer at which their ranks by attention have settled.

"Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference", arXiv 2601.07667, section 4, Algorithms 1, 2.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eval.inference.prefill import Prefill, PromptLayer, prefill
from eval.methods.common.slicing import RowPass, check_window, slicing, window_and_best, window_scores
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class ASL(RowPass):
    """The first layer whose token ranks have settled selects the tokens that go on up.

    At every layer the tokens are ranked by the attention of the last queries, summed over all heads and pooled. The
    layer l >= L_min selects if it is the first with

      var(ranks over the last L_obs layers, at l) / var(the same, at L_min) < tau

    The variance is the mean over tokens that are among the first k in any of these layers. In one pass, the layers up
    to the selection hold the whole prompt, and those above only what was selected, at its positions in the prompt. For
    decoding, the paper lets SnapKV with the same budget cut the lower layers: that is a choice on the tokens axis.

    Where the ranks never settle, or the prompt has no more tokens than the budget, nothing is dropped. The shipped
    reference model has 7 layers: its ranks do not settle at tau = 0.3, so ASL selects nothing there.

    Deviations
    - The paper starts at a third of 28 or 32 layers, so L_obs = 8 layers are always there. Where fewer are, the
      comparison is among those.
    - In two passes, the published code cuts to k by the last layer's ranks if they never settle. This keeps the prompt.

    Settings
    budget: int, tokens, default 2048: k, tokens that go on up, the window included.
    threshold: float in (0, 1), default 0.3: tau, of the relative variance.
    window: int, tokens, default 32: last queries, which score the tokens before them.
    kernel: int, odd, default 7: neighbours over which a score is averaged.
    observed: int >= 2, default 8: L_obs, layers whose ranks are compared.
    first: int or None, default None: L_min, the layer whose variance counts as 1; None takes a third of the layers.
    two_pass: bool, default False: whether all layers read what was selected once more, from position 0, as in
      GemFilter.
    """

    free = "budget"
    budget: Positive = 2048
    threshold: Annotated[float, Gt(0), Lt(1), "the paper uses 0.3"] = 0.3
    window: Positive = 32
    kernel: Positive = 7
    observed: Annotated[int, Ge(2)] = 8
    first: Positive | None = None
    two_pass: bool = False

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        check_window(self.budget, self.window, self.kernel)
        if not 1 <= self._first(config) < config.num_hidden_layers:
            raise ValueError(f"first={self.first} must be from 1 to {config.num_hidden_layers - 1}, the model's layers")

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        """The prompt decides whether and where the ranks settle."""
        layers, whole = config.num_hidden_layers, 0 if self.two_pass else self._first(config) + 1
        return [length] * whole + [min(length, self.budget)] * (layers - whole), [length] * layers

    def _first(self, config: PreTrainedConfig) -> int:
        return max(1, config.num_hidden_layers // 3) if self.first is None else self.first

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        if ids.shape[1] <= self.budget:
            return prefill(model, ids, None, room, obs_queries)
        watch = _Watch(self, self._first(model.config.get_text_config(decoder=True)))
        with slicing(model, watch):
            first = prefill(model, ids, None, room, max(self.window, obs_queries))
        if not self.two_pass or watch.selected is None:
            return first
        del first  # its K and V make place for the second pass
        return prefill(model, ids[:, watch.selected], None, room, obs_queries)


@dataclass
class _Watch:
    """The layers of one pass (Algorithm 2): the latest ranks, the variance at L_min, what was selected."""

    method: ASL
    first: int
    ranks: deque[Tensor] = field(init=False)
    initial: Tensor | None = None
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        self.ranks = deque(maxlen=self.method.observed)

    def __call__(self, index: int, layer: PromptLayer) -> Tensor | None:
        method = self.method
        if self.selected is not None or index <= self.first - method.observed:
            return None
        scores = window_scores(layer, method.window, method.kernel)
        self.ranks.append(ranks(scores))
        if index < self.first:
            return None
        variance = rank_variance(torch.stack(tuple(self.ranks)), method.budget - method.window)
        self.initial = variance if self.initial is None else self.initial
        if not variance < method.threshold * self.initial:
            return None
        self.selected = window_and_best(scores, method.budget - method.window, method.window)
        self.ranks.clear()
        # before a second pass the layers above are of no use: the last token alone costs next to nothing
        return self.selected[-1:] if method.two_pass else self.selected


def ranks(scores: Tensor) -> Tensor:
    """Rank of each score [T], 1 = the highest."""
    order = scores.argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1, device=order.device))


def rank_variance(ranks: Tensor, k: int) -> Tensor:
    """Mean biased variance over layers of ranks [layers, T], for tokens among the first k anywhere (section 4.1)."""
    return ranks[:, (ranks <= k).any(0)].double().var(0, correction=0).mean()
