"""LeanK (arXiv 2508.02215, section 3.3): the learned static mask."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import InstanceOf
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.errors import naming
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Channels, method
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.shipped import located
from leank.typed import OneOf


@method("leank")
@dataclass(frozen=True)
class LeanK(Channels):
    """One mask S, learned beforehand, selects the kept channels of K for all inputs: Q_S K_S^T stands for Q K^T.

    A head without kept channels keeps no middle at all, V included. Beyond the paper, a mask may hold mean keys, and in
    how many bits each channel of K and each head's V is stored (leank.precision); then `flush` is a multiple of 64, and
    the method has no choice of bits.
    """

    # path of a training run's mask.safetensors or of a published .pth, or the mask itself
    mask: str | InstanceOf[ChannelMask] | None = None
    # what stands for pruned channels: the mean keys that the mask's file holds, if it does, or 0 as in the paper
    compensation: Annotated[str, OneOf("mask", "none")] = field(default="mask", kw_only=True)

    @cached_property
    def loaded(self) -> ChannelMask:
        """The mask itself. Raises FileNotFoundError or ValueError naming the setting."""
        if self.mask is None or self.mask == "":
            raise ValueError("mask is not set; give mask=PATH, the mask.safetensors of a training run")
        if isinstance(self.mask, ChannelMask):
            return self.mask
        return ChannelMask.load(located(self.mask))

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        mask = self.loaded
        with naming(f"mask={self.mask if isinstance(self.mask, str) else 'given'}"):
            mask.check_model(config)

    def identity(self) -> dict[str, object]:
        """The mask's contents, not its path."""
        found: dict[str, object] = {"mask": _digest(self.loaded.keep)}
        found["pruning_ratio"] = round(self.loaded.pruning_ratio, 6)
        means, precision = self.mean_keys(), self.precision()
        found |= {} if means is None else {"means": _digest(means)}
        if precision is not None:
            found |= {"layout": _digest(precision.key_bits, precision.value_bits)}
            found |= {"scales": "packed"} if precision.packed else {}
            found["bits"] = round(16 * precision.middle_bytes, 3)  # of a number of a dense middle, scales counted
        return found

    def mean_keys(self) -> Tensor | None:
        return self.loaded.mean_keys if self.compensation == "mask" else None

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        return self.loaded.keep

    def precision(self) -> Precision | None:
        return self.loaded.precision

    def kept_counts(self, config: PreTrainedConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
        count = self.loaded.channels_per_head.numpy()
        return count, np.full_like(count, self.loaded.keep.shape[-1])


def _digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
