"""ASL (arXiv 2601.07667): tokens are dropped above the layer at which their ranks by attention have settled."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from transformers import PreTrainedModel

from eval.inference.prefill import Prefill, PromptLayer, prefill
from eval.methods.common.slicing import RowPass, check_window, slicing, window_and_best, window_scores
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class ASL(RowPass):
    """budget: tokens that go on up, k, the window included. threshold: of the relative variance, tau. window, kernel:
    last queries that score the tokens before them, and pooling. observed: layers whose ranks are compared, L_obs.
    first: the layer whose variance counts as 1, L_min; None = a third of the model's layers.

    At every layer the tokens are ranked by the attention of the last queries, summed over all heads and pooled; the
    first from L_min on at which var(ranks over L_obs layers) / var at L_min < tau selects (section 4, Algorithms 1, 2).
    One pass: the layers up to the selection hold the whole prompt (the paper has SnapKV with the same budget cut those
    for decoding: a choice on the tokens axis), those above only what was selected, at its positions in the prompt.
    two_pass: as GemFilter, all layers read what was selected once more, from position 0. Where the ranks never settle
    or the prompt has no more tokens than the budget, nothing is dropped.

    The paper starts at a third of 32 or 28 layers, so L_obs = 8 layers are always there; where fewer are, the
    comparison is among those.
    """

    free = "budget"
    budget: Positive = 2048
    threshold: Annotated[float, Gt(0), Lt(1), "the paper uses 0.3"] = 0.3
    window: Positive = 32
    kernel: Positive = 7
    observed: Annotated[int, Ge(2)] = 8
    first: Positive | None = None
    two_pass: bool = False

    def check(self, config: Any, tokenizer: Any) -> None:
        super().check(config, tokenizer)
        check_window(self.budget, self.window, self.kernel)
        if not 1 <= self._first(config) < config.num_hidden_layers:
            raise ValueError(f"first={self.first} must be from 1 to {config.num_hidden_layers - 1}, the model's layers")

    def kept_counts(self, config: Any, length: int) -> tuple[list[int], list[int]]:
        """Whether and where the ranks settle, the prompt decides."""
        layers, whole = config.num_hidden_layers, 0 if self.two_pass else self._first(config) + 1
        return [length] * whole + [min(length, self.budget)] * (layers - whole), [length] * layers

    def _first(self, config: Any) -> int:
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
    """Mean variance over layers of the ranks [layers, T] of the tokens that are among the first k in any layer
    (section 4.1; the biased variance).
    """
    return ranks[:, (ranks <= k).any(0)].double().var(0, correction=0).mean()
