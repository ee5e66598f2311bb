"""Ada-KV (arXiv 2407.11550, section 4): a layer's heads share one budget, by the scores of another choice of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import top
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Scored
from leank.eval.methods.registry import choice, name_of
from leank.typed import Share


@method("adakv")
@dataclass(frozen=True)
class AdaKV(Scored):
    """A layer keeps the H B tokens of the highest scores over all its H KV heads, B the budget, a head's mean.

      kept = top H B of {score_hj : h = 1 ... H, j = 1 ... T},   of every head at least its floor(safeguard B) best

    Deviation: the paper gives head h the budget safeguard B + (1 - safeguard) B_h, where B_h of the H B best tokens are
    its own. Here, as in kvpress, the best floor(safeguard B) of every head are certain, and the others compete.
    """

    # the choice of tokens whose scores count; it needs scores of its own and takes no budget
    scores_of: Mapping[str, Any] | None = None
    safeguard: Share = 0.2  # share of the budget that is certain in every head

    @cached_property
    def inner(self) -> Scored:
        """The choice whose scores count. Raises ValueError naming the setting at fault."""
        given = {"name": "snapkv"} if self.scores_of is None else dict(self.scores_of)
        if "budget" in given:
            raise ValueError(f"adakv.scores_of.budget={given['budget']} does not count; set adakv.budget")
        found = choice("tokens", given, "adakv.scores_of")
        if not isinstance(found, Scored) or isinstance(found, AdaKV) or type(found).scores is Scored.scores:
            raise ValueError(f"adakv.scores_of.name={given['name']} has no scores; choose snapkv, h2o or tova")
        return replace(found, budget=self.budget)

    @property
    def obs_queries(self) -> int:
        return self.inner.obs_queries

    @property
    def column_sums(self) -> bool:  # type: ignore[override]  # it is that of the other choice
        return self.inner.column_sums

    @property
    def settled(self) -> bool:
        return False

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.inner.check(config, tokenizer)

    def identity(self) -> dict[str, object]:
        """The settings, and those of the choice whose scores count."""
        inner = {"name": name_of(self.inner), **self.inner.identity()}
        return {"budget": self.budget, "safeguard": self.safeguard, "scores_of": inner}

    def protected(self, sizes: Sizes) -> Sizes:
        return self.inner.protected(sizes)

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        return self.inner.scores(layer, real, config)

    def counts(self, prefill: Prefill, sizes: Sizes) -> list[int | Tensor]:
        return self.inner.counts(prefill, sizes)

    def highest(self, scores: Tensor, count: Tensor, sizes: Sizes) -> Tensor:
        ends = sizes.sink + sizes.window
        certain = ((count + ends) * self.safeguard).long() - ends  # none where it is below 0
        shared = scores.masked_fill(top(scores, certain[:, None, None]), torch.inf).flatten(1)
        return top(shared, count[:, None] * scores.shape[1]).view_as(scores)
