"""PyramidKV (arXiv 2406.02069, section 3.2): SnapKV's choice with more tokens in lower layers than in upper ones."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.models import windows_of
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.shape import kv_shape
from leank.typed import OneOf, Positive


@method("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores choose, and each layer's budget lies on a line that falls with depth.

    Let C be the budget, the layers' mean, less sink and window (or observed tokens). The top layer chooses C // beta
    tokens, the lowest 2 C - C // beta, and those between lie on a line. A prompt with less than the lowest layer's
    share gives that layer all it has, and the line ends higher. Each layer's share is rounded down, and what that
    leaves goes to the largest remainders, the lower layer first, so that all layers together choose L C exactly.

    Deviations
    - The authors' code rounds the step between layers down and so holds up to 15% more tokens at small budgets:
      rounding="authors". It leaves prompts of less than 2 C tokens to SnapKV.
    - The authors' window is 8, and their pooling is max by default. Here both are SnapKV's defaults, so that the two
      methods differ in nothing but the layers' shares.
    """

    beta: Positive = 20  # the top layer gets 1 / beta of the mean
    # whether the shares add up, or the step is rounded down
    rounding: Annotated[str, OneOf("exact", "authors")] = "exact"

    def shares(self, mean: int, available: int, layers: int) -> list[int]:
        """Tokens of each layer between sink and window, the lowest first; see `pyramid`."""
        if self.rounding == "exact" or layers < 2:
            return pyramid(mean, available, layers, self.beta)
        most = min(2 * mean - mean // self.beta, available)
        step = (2 * (most - mean)) // (layers - 1)
        return [most - index * step for index in range(layers)]

    def counts(self, prefill: Prefill, sizes: Sizes) -> list[int | Tensor]:
        full = [index for index, layer in enumerate(prefill.layers) if isinstance(layer, PromptLayer)]
        middles = (prefill.lengths - sizes.sink - sizes.window).clamp(min=0).tolist()
        means = [self.between(length, sizes) for length in prefill.lengths.tolist()]
        rows = torch.tensor(
            [self.shares(mean, middle, len(full)) for mean, middle in zip(means, middles, strict=True)]
        )  # [B, full layers]
        counts: list[int | Tensor] = [0] * len(prefill.layers)
        for place, index in enumerate(full):
            counts[index] = rows[:, place]
        return counts

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray:
        layers, heads, _ = kv_shape(config)
        protected = self.protected(sizes)
        middle = max(0, max(columns) - protected.sink - protected.window)
        full, counts = [i for i, window in enumerate(windows_of(config)) if window is None], np.zeros(layers, dtype=int)
        counts[full] = self.shares(self.between(max(columns), protected), middle, len(full))
        return np.tile(counts[:, None] + protected.window - sizes.window, heads)


def pyramid(mean: int, available: int, layers: int, beta: int) -> list[int]:
    """Tokens of each layer, the lowest first: on a line, `mean` on average, or all of the `available` where fewer."""
    if layers < 2:
        return [mean] * layers
    most = min(2 * mean - mean // beta, available)
    steps, fall = layers - 1, 2 * (most - mean)  # the highest layer gets 2 mean - most
    shares, parts = zip(*(divmod(most * steps - index * fall, steps) for index in range(layers)), strict=True)
    raised = sorted(range(layers), key=lambda index: -parts[index])[: mean * layers - sum(shares)]
    return [share + (index in raised) for index, share in enumerate(shares)]
