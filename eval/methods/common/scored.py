"""The base of choices that keep, in every head, the tokens of the highest scores within a budget."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from annotated_types import Gt, Lt
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import top
from leank.eval.cache.storage.eviction import SCORE, HeavyHitters
from leank.eval.cache.storage.sizes import Sizes, middle_columns, real_positions
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Held, Tokens
from leank.shape import kv_shape
from leank.typed import Positive


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise PydanticCustomError("odd", "must be odd; the papers pool over 5 or 7 tokens")
    return kernel


Budget = Positive | Annotated[float, Gt(0), Lt(1)]
Kernel = Annotated[Positive, AfterValidator(_odd)]  # tokens that a score is pooled over, itself in the middle


def middle_budget(budget: int, sizes: Sizes) -> int:
    """Tokens of the middle that a head may keep of `budget`. Raises ValueError if the ends alone exceed it."""
    left = budget - sizes.sink - sizes.window
    if left < 0:
        raise ValueError(
            f"budget={budget} is less than sink={sizes.sink} and window={sizes.window}, whose tokens always stay; "
            f"raise it to at least {budget - left}, or lower sink or window"
        )
    return left


@dataclass(frozen=True)
class Scored(Tokens):
    """Sink and window stay and count as part of the budget, and between them the tokens of the highest scores.

    The budget holds for the prompt; new tokens all stay, but under a choice that is `Evicting`.
    """

    free = "budget"
    # what a KV head keeps of the prompt in all, sink and window included. A share is rounded down.
    budget: Budget = 1024

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        """The score of every token of one layer, [B, H, T]; real: bool [B, T]. Of equal ones the earlier stays."""
        raise NotImplementedError(f"{type(self).__name__} defines of_layer in its place")

    def check_sizes(self, sizes: Sizes) -> None:
        if isinstance(self.budget, int):
            middle_budget(self.budget, self.protected(sizes))

    def protected(self, sizes: Sizes) -> Sizes:
        """Sink and window, widened to all tokens that stay whatever their score."""
        return sizes

    def between(self, length: int, sizes: Sizes) -> int:
        """Tokens between sink and window that stay of a prompt of `length` tokens. sizes: from `protected`."""
        if isinstance(self.budget, int):
            return middle_budget(self.budget, sizes)
        return max(0, int(self.budget * length) - sizes.sink - sizes.window)

    def counts(self, prefill: Prefill, sizes: Sizes) -> list[int | Tensor]:
        """For each layer, how many tokens between sink and window stay in each row [B]. sizes: from `protected`."""
        rows = torch.tensor([self.between(length, sizes) for length in prefill.lengths.tolist()])
        return [rows] * len(prefill.layers)

    def highest(self, scores: Tensor, count: Tensor, sizes: Sizes) -> Tensor:
        """The `count` [B] tokens of the middle that stay in every head, bool [B, H, T]; scores: -inf outside it."""
        return top(scores, count[:, None, None])

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        sizes = self.protected(sizes)
        return [
            self._kept(index, prefill, count, config, sizes) if isinstance(layer, PromptLayer) else None
            for index, (layer, count) in enumerate(zip(prefill.layers, self.counts(prefill, sizes), strict=True))
        ]

    def of_layer(self, index: int, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        """`scores` of layer `index`, [B, H, T]; a choice that needs more than the layer defines this instead."""
        layer = prefill.layers[index]
        return self.scores(layer, layer.real(prefill.real), config)

    def _kept(
        self, index: int, prefill: Prefill, count: int | Tensor, config: PreTrainedConfig, sizes: Sizes
    ) -> Tensor | None:
        """Sink, window and `count` tokens between them in one layer, bool [B, H, T]; None if that is all of them."""
        layer: PromptLayer = prefill.layers[index]
        real = layer.real(prefill.real)
        none_seen = torch.zeros(len(layer.keys), dtype=torch.long, device=layer.keys.device)
        position = real_positions(none_seen, layer.keys.shape[2], real)
        middle = middle_columns(position, sizes)
        count = torch.as_tensor(count, device=middle.device).expand(len(middle))
        if bool((middle.sum(-1) <= count).all()):
            return None
        ends = (position >= 0) & ~middle
        scores = self.of_layer(index, prefill, config).masked_fill(~middle[:, None], -torch.inf)
        return self.highest(scores, count, sizes) & middle[:, None] | ends[:, None]

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray | None:
        protected = self.protected(sizes)
        count = self.between(max(columns), protected) + protected.window - sizes.window
        return np.full(kv_shape(config)[:2], count)


@dataclass(frozen=True)
class Evicting(Scored):
    """A choice whose budget, a number of tokens, also holds while decoding, by scores that every step renews."""

    # whether the budget also holds while decoding. If not, every new token stays, and the choice may be combined with
    # bits and reads.
    evict: bool = field(default=True, kw_only=True)

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        if self.evict and not isinstance(self.budget, int):
            raise ValueError(f"budget={self.budget} is a share of the prompt; evict=true needs a number of tokens")

    def eviction(self, index: int, config: PreTrainedConfig, sizes: Sizes) -> HeavyHitters | None:
        most = self.most(sizes)
        return None if most is None else self.policy(most, index, config)

    def most(self, sizes: Sizes) -> int | None:
        return self.between(0, sizes) if self.evict else None

    @abstractmethod
    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> HeavyHitters:
        """How tokens of layer `index` leave while decoding. heavy: tokens of the middle that stay."""

    def extra_bytes(self, held: Held) -> float:
        return scores_bytes(held) if self.evict else 0


def scores_bytes(held: Held) -> float:
    """Bytes of the scores of all tokens held; a layer's heads have as many as its longest."""
    return SCORE * float((held.ends + held.middle).max(1).sum()) * held.k.shape[1]
