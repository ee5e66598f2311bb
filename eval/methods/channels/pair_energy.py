"""The form of PCA (eval.methods.bits.pca) whose basis RoPE leaves as it is; no paper proposes this baseline."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import method
from leank.eval.methods.common.calibrated import Calibrated
from leank.eval.methods.common.observed import seen
from leank.rotary import rotates_halves


@method("pair_energy")
@dataclass(frozen=True)
class PairEnergy(Calibrated):
    """Every head keeps the channels of the RoPE pairs with the largest mean energy of keys.

      Score[p] = mean over samples and tokens of k_p^2 + k_{p + D/2}^2

    RoPE turns each pair at a frequency of its own, so the subspaces that it leaves as they are at all positions are
    those spanned by whole pairs. Among them these keep the most of K. The queries are not looked at. If the number of
    kept channels is odd, one pair is split.
    """

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if not rotates_halves(config):
            raise ValueError(
                "pair_energy needs a model whose RoPE rotates all channels, p and p + D / 2 together, and "
                f"{config.model_type} does not; use static_norm"
            )
        super().check(config, tokenizer)

    def scores(self, prefill: Prefill) -> Tensor:
        energy = torch.stack([layer.keys.square().mean(2) for layer in seen(prefill)], 1)  # [B, L, H, D]
        low, high = energy.chunk(2, -1)
        return (low + high).repeat(1, 1, 1, 2)
