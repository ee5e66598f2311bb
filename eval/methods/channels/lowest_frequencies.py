"""The RoPE pairs of the lowest frequencies, as many in every head; needs neither training nor data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from eval.inference.models import shape_of
from eval.inference.prefill import Prefill
from eval.methods.axes import Uniform
from leank_train.channel_scores import lowest_frequencies
from leank_train.common.typed import Share


@dataclass(frozen=True)
class LowestFrequencies(Uniform):
    """ratio: share of K channels pruned."""

    ratio: Share = 0.7

    def check(self, config: Any, tokenizer: Any) -> None:
        lowest_frequencies(config, self.ratio)

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        return lowest_frequencies(config, self.ratio).keep

    def kept_counts(self, config: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        count = lowest_frequencies(config, self.ratio).channels_per_head.numpy()
        return count, np.full_like(count, shape_of(config)[2])
