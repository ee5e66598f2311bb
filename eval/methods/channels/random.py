"""Random channels, equally many in every head: the floor of every table. No paper proposes it."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from leank.channel_scores import random_mask
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Uniform, method
from leank.shape import kv_shape
from leank.typed import Seed, Share


@method("random")
@dataclass(frozen=True)
class Random(Uniform):
    """Every head keeps channels that are drawn once and are the same for all inputs."""

    ratio: Share = 0.7  # share of K channels pruned; floor(ratio * D) go in every head
    seed: Seed = 0  # seed of the draw

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return random_mask(kv_shape(config), self.ratio, self.seed).keep
