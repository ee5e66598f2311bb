"""PCA: every head stores its keys by their coordinates in a static basis of fewer dimensions.

The basis is that of "Loki: Low-rank Keys for Efficient Sparse Attention", arXiv 2406.02542, section 3. Storing the
coordinates is "Eigen Attention: Attention in Low-Rank Space for KV Cache Compression", arXiv 2408.05646.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from leank.channel_scores import pruned, wide
from leank.eval.cache.storage.codecs import RecordCodec
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.common.calibrated import FromSamples, Pruning
from leank.eval.methods.common.observed import seen


class LowRank(FromSamples, Pruning, Bits):
    """Keys of D - floor(ratio D) coordinates, which calibration samples choose."""

    free = "ratio"

    def sized(self, index: int, held: Held) -> RecordCodec:
        return Coordinates(torch.empty(held.dim, held.dim - pruned(held.dim, self.ratio), device="meta"))


@method("pca")
@dataclass(frozen=True)
class PCA(LowRank):
    """A key k is stored as k U and read as k U U^T.

      U = the D - floor(ratio D) eigenvectors of the largest eigenvalues of the mean of k^T k

    The mean is over the keys, after RoPE, of calibration samples, per layer and KV head. No other static basis of a
    head has a smaller mean ||k - k U U^T||^2. A mask of channels is such a basis whose vectors are axes, so this shows
    what the choice of axes costs. `pair_energy` is the form that RoPE leaves as it is.

    U serves all prompts, so its D - floor(ratio D) times D numbers per KV head count as weights and not as cache.

    Deviations
    - Loki reads all of K and uses the coordinates to choose tokens. Eigen Attention takes its basis from queries and
      keys before RoPE, of the heads of a layer together, and compresses V as well.
    - Plain PyTorch turns the coordinates back: answers are the method's, time is not.
    """

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """The mean of k^T k over all tokens, [L, H, D, D], float64."""
        total, tokens = torch.zeros(()), 0
        for prefill in passes:
            layers = [(layer.keys.mT @ layer.keys)[0].double().cpu() for layer in seen(prefill)]
            total, tokens = total + torch.stack(layers), tokens + prefill.columns
        return total / tokens

    def basis(self) -> Tensor:
        """U of every head [L, H, D, r], float64. Raises RuntimeError before calibration."""
        moments = self._found[self.calibrated_on]
        dim = moments.shape[-1]
        return torch.linalg.eigh(moments).eigenvectors.flip(-1)[..., : dim - pruned(dim, self.ratio)]

    def of_layer(self, index: int, prefill: Prefill) -> Coordinates:
        return Coordinates(self.basis()[index])


@dataclass(frozen=True)
class Coordinates(RecordCodec):
    """The codec of one layer: coordinates in a basis [H, D, r], the same for all prompts."""

    basis: Tensor

    @property
    def width(self) -> int:
        return self.basis.shape[-1]

    def encode(self, keys: Tensor, rows: np.ndarray) -> Tensor:
        return keys.to(wide(keys)) @ self.basis.to(wide(keys))

    def decode(self, records: Tensor, rows: np.ndarray) -> Tensor:
        return records.to(wide(records)) @ self.basis.to(wide(records)).mT

    def to(self, device: torch.device) -> Self:
        return replace(self, basis=self.basis.to(device))
