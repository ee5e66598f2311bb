"""StreamingLLM (arXiv 2309.17453, section 3.2): the first and the last tokens stay, in every head."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Tokens, method
from leank.shape import kv_shape


@method("streaming_llm")
@dataclass(frozen=True)
class StreamingLLM(Tokens):
    """The middle is empty, after the prompt and while decoding.

    The cache's sink and window are the whole budget; the paper's 4 + 1020 tokens are sink=4, window=1020.

    Deviations
    - The window grows by up to `flush` tokens before it is cut back.
    - Tokens keep the positions that they have in the text. The paper numbers the held tokens anew, which matters only
      beyond the lengths that a model was trained on.
    """

    free = "window"

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        return [
            torch.zeros_like(layer.keys[..., 0], dtype=torch.bool) if isinstance(layer, PromptLayer) else None
            for layer in prefill.layers
        ]

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray:
        return np.zeros(kv_shape(config)[:2])

    def joins(self, config: PreTrainedConfig) -> Tensor:
        layers, heads, _ = kv_shape(config)
        return torch.zeros(layers, heads, dtype=torch.bool)
