"""Key magnitude (ThinK, arXiv 2407.21018, Eq. 1 and table 1): channels of the largest norm, whatever the queries."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import best
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Uniform, method
from leank.eval.methods.common.observed import seen
from leank.typed import OneOf, Share


@method("magnitude")
@dataclass(frozen=True)
class Magnitude(Uniform):
    """Every head keeps the channels of the largest norm over the prompt's keys that stay.

      M[d] = ||K[:, d]||_p        (Eq. 1)

    Deviation: generated keys are pruned when they leave the window; the paper keeps them whole.
    """

    ratio: Share = 0.7  # share of K channels pruned; floor(ratio * D) go in every head
    norm: Annotated[int, OneOf(1, 2)] = 2  # p of the norm

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        norms = [torch.linalg.vector_norm(layer.keys, self.norm, dim=2) for layer in seen(prefill)]
        return best(torch.stack(norms, 1), self.ratio)
