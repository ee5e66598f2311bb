"""ASL (arXiv 2601.07667, section 4, Algorithms 1, 2): tokens leave above the layer at which their ranks settled."""

import hashlib
import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Kernel
from leank.eval.methods.common.slicing import (
    RowPass,
    check_window,
    layer_at,
    slicing,
    window_and_best,
    window_scores,
)
from leank.typed import Count, Positive

NOWHERE = -1  # in place of the layer, where none was selected
DEEP = 24  # layers from which on the paper's rule is used; the paper's models have 28 and 32


class LayerRule(NamedTuple):
    """L_min, L_obs and tau."""

    first: int
    observed: int
    threshold: float


def few_layers(layers: int) -> LayerRule:
    """The rule for a model of fewer than DEEP layers, which the paper's does not fit.

    L_obs = 8 does not fit into so few layers, and the ranks of fewer layers vary less apart from each other, so the
    relative variance falls less: the rule is

      L_obs = layers // 3, at least 2;   tau on the straight line from 0.95 at L_obs = 2 to the paper's 0.3 at 8;
      L_min = layers // 2, but so that at least one layer is left that can select and drop tokens.

    L_min is late because ranks of neighbouring layers come near each other once before the layers that retrieve, and
    a layer that selects there loses the answer. It was chosen at 7 layers (docs/lab/reference/methods.md).
    """
    observed = max(2, layers // 3)
    first = max(1, min(layers // 2, layers - 3))
    return LayerRule(first, observed, 0.95 - 0.65 * (observed - 2) / 6)


@method("asl")
@dataclass(frozen=True)
class ASL(RowPass):
    """The first layer whose token ranks have settled selects the tokens that go on up.

    At every layer the tokens are ranked by the attention of the last queries, summed over all heads and pooled. The
    layer l >= L_min selects if it is the first with

      var(ranks over the last L_obs layers, at l) / var(the same, at L_min) < tau

    The variance is the mean over tokens that are among the first k in any of these layers. In one pass, the layers up
    to the selection hold the whole prompt, and those above only what was selected, at its positions in the prompt. For
    decoding, the paper lets SnapKV with the same budget cut the lower layers: that is a choice on the tokens axis.

    A prompt of no more tokens than the budget is read whole. Where the ranks have not settled below the last layer,
    one pass drops nothing. Two passes select by the last layer's ranks, as the published code does.

    The variance is over L_obs layers, as in Algorithm 2 and the published code; section 4.1's formulas have one more.
    Scores are summed over all KV heads, as section 4.1 and the code have it; Algorithm 1 ranks in each.

    What is not set follows from the number of layers L: the paper's L_min = L // 3, L_obs = 8 and tau = 0.3 from 24
    layers on, and `few_layers` below, where the paper's settings never select.
    """

    free = "budget"
    budget: Positive = 2048  # k, tokens that go on up, the window included
    # tau, of the relative variance; None is by the rule of the layers
    threshold: Annotated[float, Gt(0), Lt(1), "the paper uses 0.3"] | None = None
    window: Positive = 32  # last queries, which score the tokens before them
    kernel: Kernel = 7  # neighbours over which a score is averaged
    # L_obs, layers whose ranks are compared; where fewer are below, those
    observed: Annotated[int, Ge(2)] | None = None
    first: Positive | None = None  # L_min, the layer whose variance counts as 1; None is by the rule of the layers
    two_pass: bool = False  # whether all layers read what was selected once more, from position 0, as in GemFilter
    layer: Count | None = None  # select at this layer, whatever the ranks, for curves of cost and of quality

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        check_window(self.budget, self.window)
        if config.num_hidden_layers < 2:
            raise ValueError("asl drops tokens above a layer, and the model has one layer: leave out `prefill`")
        if not 1 <= self.rule(config).first < config.num_hidden_layers:
            raise ValueError(f"first={self.first} must be from 1 to {config.num_hidden_layers - 1}, the model's layers")
        if self.layer is not None:
            layer_at(self.layer, 0, config)

    def identity(self) -> dict[str, object]:
        """Every setting, and by which rule the unset ones follow from the layers: rows of another rule are others."""
        found = super().identity()
        if self.layer is None and None in (self.first, self.observed, self.threshold):
            rules = [few_layers(layers) for layers in range(1, DEEP)]
            found["rule"] = hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:10]
        return found

    def rule(self, config: PreTrainedConfig) -> LayerRule:
        """L_min, L_obs and tau for a model."""
        layers = config.num_hidden_layers
        rule = LayerRule(layers // 3, 8, 0.3) if layers >= DEEP else few_layers(layers)
        return LayerRule(
            rule.first if self.first is None else self.first,
            rule.observed if self.observed is None else self.observed,
            rule.threshold if self.threshold is None else self.threshold,
        )

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[list[int], list[int]]:
        """The prompt decides whether and where the ranks settle, unless there are two passes or the layer is given."""
        layers, few = config.num_hidden_layers, min(length, self.budget)
        if self.two_pass:
            return [few] * layers, [few] * layers
        whole = min(layers, 1 + (self.rule(config).first + 1 if self.layer is None else self.layer))
        least = [length] * whole + [few] * (layers - whole)
        return least, least if self.layer is not None else [length] * layers

    def row(self, model: PreTrainedModel, ids: Tensor, room: int, obs_queries: int) -> Prefill:
        if ids.shape[1] <= self.budget:
            return replace(prefill(model, ids, None, room, obs_queries), selected_at=[NOWHERE])
        watch = _Watch(self, model.config.get_text_config(decoder=True))
        with slicing(model, watch):
            first = prefill(model, ids, None, room, max(self.window, obs_queries))
        if self.two_pass:
            del first  # its K and V make place for the second pass
            first = prefill(model, ids[:, watch.selected], None, room, obs_queries)
        return replace(first, selected_at=[watch.at])


class _Watch:
    """The layers of one pass (Algorithm 2): the latest ranks, the variance at L_min, what was selected, and where."""

    def __init__(self, method: ASL, config: PreTrainedConfig) -> None:
        self.method, self.rule, self.last = method, method.rule(config), config.num_hidden_layers - 1
        self.ranks: deque[Tensor] = deque(maxlen=self.rule.observed)
        self.initial: Tensor | None = None
        self.selected: Tensor | None = None
        self.at = NOWHERE

    def __call__(self, index: int, layer: PromptLayer) -> Tensor | None:
        method = self.method
        if self.selected is not None or (method.layer is None and index <= self.rule.first - self.rule.observed):
            return None
        if index == self.last and not method.two_pass:  # nothing is above it, so its tokens would not be dropped
            return None
        scores = window_scores(layer, method.window, method.kernel)
        settled = index == method.layer if method.layer is not None else self._settled(index, scores)
        if not settled and not (method.two_pass and index == self.last):
            return None
        self.selected = window_and_best(scores, method.budget - method.window, method.window)
        self.at = index if settled else NOWHERE
        self.ranks.clear()
        # before a second pass the layers above are of no use: the last token alone costs next to nothing
        return self.selected[-1:] if method.two_pass else self.selected

    def _settled(self, index: int, scores: Tensor) -> bool:
        """Whether the relative variance has fallen below tau at this layer."""
        self.ranks.append(ranks(scores))
        if index < self.rule.first:
            return False
        variance = rank_variance(torch.stack(tuple(self.ranks)), self.method.budget - self.method.window)
        self.initial = variance if self.initial is None else self.initial
        return bool(variance < self.rule.threshold * self.initial)


def ranks(scores: Tensor) -> Tensor:
    """Rank of each score [T], 1 = the highest."""
    order = scores.argsort(descending=True, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1, device=order.device))


def rank_variance(ranks: Tensor, k: int) -> Tensor:
    """Mean biased variance over layers of ranks [layers, T], for tokens among the first k anywhere (section 4.1)."""
    return ranks[:, (ranks <= k).any(0)].double().var(0, correction=0).mean()
