"""Double Sparsity's outlier channels (arXiv 2408.07092) as a channel mask (LeanK, appendix B and table 10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.inference.prefill import Prefill
from eval.methods.common.calibrated import Calibrated
from eval.methods.common.observed import seen
from leank_train.common.typed import Positive


@dataclass(frozen=True)
class DoubleSparsityChannels(Calibrated):
    """Keep the channels i of the largest mean |q_i k_i|, query and key of the same token, after RoPE.

    The mean is over all tokens of all blocks and over the query heads of a group. Deviations: the published code's
    accumulation keeps its last block only, here all count; its 256 blocks of 512 tokens are of a text corpus, here
    they are samples of `task` (niah_single_2: natural text), each a prompt of at most `length` tokens.
    """

    task: str = "niah_single_2"
    length: Positive = 512
    samples: Positive = 256

    @property
    def observed(self) -> int:
        return self.length

    def scores(self, prefill: Prefill) -> Tensor:
        layers = []
        for layer in seen(prefill):
            k = layer.keys[:, :, None]  # [B, H, 1, T, D]
            q = layer.queries(self.observed).unflatten(1, (k.shape[1], -1))  # [B, H, G, T, D]
            layers.append((q * k).abs().mean((2, 3)))
        return torch.stack(layers, 1)
