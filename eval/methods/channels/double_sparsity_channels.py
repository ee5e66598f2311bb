"""Double Sparsity (arXiv 2408.07092, section 3) as a mask of channels (LeanK, arXiv 2508.02215, table 10)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.calibrated import Calibrated
from leank.eval.methods.common.observed import seen
from leank.typed import Positive, Samples


@method("double_sparsity_channels")
@dataclass(frozen=True)
class DoubleSparsityChannels(Calibrated):
    """The channels with the largest mean product of a query and the key of the same token stay.

      Score[i] = mean over tokens t and query heads of the group of |q_ti k_ti|        (after RoPE)

    Deviations
    - All calibration blocks count. The accumulation in the published code keeps its last block only, and its reshape
      mixes heads.
    - The published 256 blocks of 512 tokens come from a text corpus. Here they are samples of `task`, and the default
      task is written in natural text. Each is a prompt of at most `length` tokens.
    """

    task: str = "niah_single_2"
    length: Positive = 512
    samples: Samples = 256

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
