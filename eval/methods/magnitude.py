"""Key magnitude: of each sample, keep in every head the channels of the largest norm, whatever the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.methods.axes import Uniform
from eval.methods.observed import seen
from eval.prefill import Prefill
from leank_train.channel_scores import best, pruned


@dataclass(frozen=True)
class Magnitude(Uniform):
    """M[d] = ||K[:, d]||_p over the prompt's keys that stay (ThinK, Eq. 1 and table 1).

    ratio: share of K channels pruned, floor(ratio * D) of every head. norm: p, 1 or 2.
    """

    ratio: float = 0.7
    norm: int = 2

    def check(self, config: Any, tokenizer: Any) -> None:
        pruned(1, self.ratio)
        if self.norm not in (1, 2):
            raise ValueError(f"norm={self.norm} is unknown; use 1 or 2")

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        norms = [torch.linalg.vector_norm(layer.keys, self.norm, dim=2) for layer in seen(prefill)]
        return best(torch.stack(norms, 1), self.ratio)
