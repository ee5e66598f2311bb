"""ThinK (arXiv 2407.21018): of each sample, keep in every head the channels with the largest |Q_obs| |K|."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.methods.axes import Channels
from eval.prefill import Prefill, PromptLayer
from leank_train.baselines import think_mask
from leank_train.prefix import Branch, Prefix


@dataclass(frozen=True)
class ThinK(Channels):
    """ratio: share of K channels pruned. queries: how many of the prompt's last queries are observed."""

    ratio: float = 0.7
    queries: int = 32

    @property
    def obs_queries(self) -> int:  # type: ignore[override]
        return self.queries

    def check(self, config: Any, tokenizer: Any) -> None:
        check_observed(self.ratio, self.queries)

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        return think_mask(*observed(prefill, self.queries), self.ratio)


def check_observed(ratio: float, queries: int) -> None:
    """Raise ValueError for a ratio or a number of queries that makes no sense."""
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio={ratio} is not in [0, 1); it is the share of K channels to prune, such as 0.7")
    if queries < 1:
        raise ValueError(f"queries={queries} must be at least 1; ThinK observes 32")


def observed(prefill: Prefill, queries: int) -> tuple[Prefix, Branch]:
    """The whole prompt as a branch of an empty document, in the form in which leank_train.baselines scores it.

    Layers whose attention slides stay dense whatever is chosen for them, so they count as zero. Raises ValueError if a
    prompt has fewer tokens than `queries`.
    """
    shortest = int(prefill.lengths.min())
    if shortest < queries:
        raise ValueError(f"a prompt of {shortest} tokens has no {queries} queries to observe; lower queries")
    full = next((layer for layer in prefill.layers if isinstance(layer, PromptLayer)), None)
    if full is None:
        raise ValueError("every layer of the model has a sliding window: there is no middle, and nothing to observe")
    batch, columns = len(prefill.logits), prefill.columns
    real = full.keys.new_ones(batch, columns, dtype=torch.bool) if prefill.real is None else prefill.real
    positions = torch.where(real, real.long().cumsum(-1) - 1, -1)
    zero = torch.zeros(batch, dtype=torch.long, device=real.device)
    dense = [layer if isinstance(layer, PromptLayer) else full for layer in prefill.layers]
    seen = [layer.queries[:, :, -queries:] for layer in dense if layer.queries is not None]
    prefix = Prefix([d.keys[:, :, :0] for d in dense], [d.values[:, :, :0] for d in dense], positions[:, :0], zero)
    branch = Branch(
        [d.keys for d in dense], [d.values for d in dense], positions, prefill.lengths, zero, prefill.logits, seen
    )
    return prefix, branch
