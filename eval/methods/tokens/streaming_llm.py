"""StreamingLLM (arXiv 2309.17453): the first and the last tokens stay, in every head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.store import Sizes
from eval.inference.models import shape_of
from eval.inference.prefill import Prefill, PromptLayer
from eval.methods.axes import Tokens


@dataclass(frozen=True)
class StreamingLLM(Tokens):
    """The middle is empty, after the prompt and while decoding; the cache's sink and window are its whole budget.

    The paper's 4 + 1020 tokens are sink=4, window=1020; the window grows by up to `flush` tokens before it is cut
    back. Tokens keep the positions that they have in the text; the paper numbers those that are held anew, which
    matters only beyond the lengths that a model was trained on.
    """

    free = "window"

    def keep_mask(self, prefill: Prefill, config: Any, sizes: Sizes) -> list[Tensor | None]:
        return [
            torch.zeros_like(layer.keys[..., 0], dtype=torch.bool) if isinstance(layer, PromptLayer) else None
            for layer in prefill.layers
        ]

    def kept_counts(self, config: Any, columns: list[int], sizes: Sizes) -> np.ndarray:
        return np.zeros(shape_of(config)[:2])

    def joins(self, config: Any) -> Tensor:
        layers, heads, _ = shape_of(config)
        return torch.zeros(layers, heads, dtype=torch.bool)
