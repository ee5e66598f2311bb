"""Key magnitude: of each sample, keep in every head the channels of the largest norm, whatever the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from eval.inference.prefill import Prefill
from eval.methods.axes import Uniform
from eval.methods.common.observed import seen
from leank_train.channel_scores import best
from leank_train.common.typed import OneOf, Share


@dataclass(frozen=True)
class Magnitude(Uniform):
    """M[d] = ||K[:, d]||_p over the prompt's keys that stay (ThinK, Eq. 1 and table 1).

    ratio: share of K channels pruned, floor(ratio * D) of every head. norm: p, 1 or 2.
    """

    ratio: Share = 0.7
    norm: Annotated[int, OneOf(1, 2)] = 2

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        norms = [torch.linalg.vector_norm(layer.keys, self.norm, dim=2) for layer in seen(prefill)]
        return best(torch.stack(norms, 1), self.ratio)
