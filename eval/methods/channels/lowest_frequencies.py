"""The RoPE pairs that learned masks favour (LeanK, arXiv 2508.02215, section 5.2); no paper proposes this baseline."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import lowest_frequencies
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Uniform, method
from leank.shape import kv_shape
from leank.typed import Share


@method("lowest_frequencies")
@dataclass(frozen=True)
class LowestFrequencies(Uniform):
    """Every head keeps the RoPE pairs p of the lowest frequencies theta^(-2p / D).

    A pair p of D / 2 rotates two channels, p and p + D / 2 in most models, and stays or goes as a whole. An odd number
    of channels to prune takes one pair more.
    """

    ratio: Share = 0.7  # share of K channels pruned

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        lowest_frequencies(config, self.ratio)

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return lowest_frequencies(config, self.ratio).keep

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
        count = lowest_frequencies(config, self.ratio).channels_per_head.numpy()
        return count, np.full_like(count, kv_shape(config)[2])
