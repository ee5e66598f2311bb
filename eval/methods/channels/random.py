"""Random channels, as many in every head: the floor of every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eval.inference.models import shape_of
from eval.inference.prefill import Prefill
from eval.methods.axes import Uniform
from leank_train.channel_scores import random_mask
from leank_train.common.typed import Seed, Share


@dataclass(frozen=True)
class Random(Uniform):
    """ratio: share of K channels pruned. seed: of the draw."""

    ratio: Share = 0.7
    seed: Seed = 0

    def check(self, config: Any, tokenizer: Any) -> None:
        random_mask(shape_of(config), self.ratio, self.seed)

    def keep_mask(self, prefill: Prefill, config: Any) -> Tensor:
        return random_mask(shape_of(config), self.ratio, self.seed).keep
