"""OSCAR: K and V in 2 bits, in the directions of a layer's queries and of its weighted values.

"OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", arXiv 2605.17757.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from leank.channel_scores import wide
from leank.eval.cache.storage.codecs import BandCodec, OfHeads
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.bits.turboquant import Even
from leank.eval.methods.common.calibrated import FromSamples
from leank.eval.methods.common.hadamard import hadamard
from leank.eval.methods.common.observed import seen
from leank.typed import OneOf, Positive, Samples

Clip = Annotated[float, Gt(0), Le(1)]


@method("oscar")
@dataclass(frozen=True)
class OSCAR(FromSamples, Bits):
    """A head's vector x is turned, clipped, and stored on an even grid of 2^bits levels of its own.

      y = x U H,   t = the |y_j| of which int(clip D) are not larger,   code of min(max(y_j, -t), t) (`turboquant.Even`)

    U has the eigenvectors of a covariance over the calibration samples, the same for all heads of a layer, and H is the
    Hadamard matrix. The covariance for K is that of the layer's queries, and for V that of the values, each weighted by
    k (Q^T Q) k^T of its token, in every head to a mean weight of 1. U H serves all prompts, so it counts as weights.

    centred: whether K's mean over the samples is taken off first and added again; no part of the paper. It keeps
      channels that are far from 0 for all tokens from widening the grid.

    Deviations
    - The permutation behind H is left out: with one group a head it changes nothing. The authors' groups have 128
      numbers, here a group is a head.
    - Scales and least numbers have the model's dtype, the authors' float32 in one setting and 16 bits in another.
    - Calibration samples are RULER's prompts of natural text; the authors take GPQA's, 30,000 tokens as here.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.
    """

    bits: Annotated[int, OneOf(2, 3, 4)] = 2  # of a number
    k_clip: Clip = 0.96  # share of a key's numbers that are not clipped; 1 clips none
    v_clip: Clip = 0.92  # the same for a value
    centred: bool = False
    task: str = "niah_single_2"
    length: Positive = 2048
    samples: Samples = 15

    @property
    def observed(self) -> int:
        """All queries of a sample."""
        return self.length

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        return self.task, self.length, self.samples, self.seed

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """Of every layer both covariances, for K and V, and of every head K's mean in row 0: [L, 2 + H, D, D]."""
        total, count = torch.zeros(()), 0
        for prefill in passes:
            found = []
            for one in seen(prefill):
                keys, values = one.keys[0].double(), one.layer.values[0].double()
                queries = one.queries(self.length)[0].double().unflatten(0, (len(keys), -1)).flatten(1, 2)
                moment = queries.mT @ queries  # [H, D, D], over a group's queries
                weight = ((keys @ moment) * keys).sum(-1)
                weight = weight / weight.mean(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
                of_values = values.mT @ (weight[..., None] * values) / keys.shape[1]
                means = torch.zeros_like(moment)
                means[:, 0] = keys.mean(1)
                covariances = torch.stack([(moment / queries.shape[1]).mean(0), of_values.mean(0)])
                found.append(torch.cat([covariances, means]).cpu())
            total, count = total + torch.stack(found), count + 1
        return total / count

    def of_layer(self, index: int, prefill: Prefill) -> BandCodec:
        found = self._found[self.calibrated_on][index]
        turn = [torch.linalg.eigh(covariance).eigenvectors.flip(-1) for covariance in found[:2]]
        k, v = (vectors @ hadamard(len(vectors)) for vectors in turn)
        values = Turned(self.bits, v, self.v_clip)
        means = found[2:, 0] if self.centred else [None] * len(found[2:])
        return OfHeads(tuple((Turned(self.bits, k, self.k_clip, mean), values) for mean in means))

    def sized(self, index: int, held: Held) -> BandCodec:
        return Even(self.bits)


@dataclass(frozen=True, eq=False)
class Turned(Even):
    """A vector's numbers in another orthonormal basis, clipped, on an even grid from the least to the largest of them.

    basis: [D, D], orthonormal columns
    clip: share of a vector's numbers that are not clipped, default 1: all
    mean: [D], taken off before and added again; default None
    """

    basis: Tensor = None  # type: ignore[assignment]  # a field behind one that has a default needs one
    clip: float = 1.0
    mean: Tensor | None = None
    holds = "vectors in another basis"

    # Heads whose codecs are equal are read together; `Even` would compare the bits alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., D], and scale and least number, [..., 2]. Raises ValueError for pruned channels."""
        dim, y = x.shape[-1], x.to(wide(x))
        if dim != len(self.basis):
            raise ValueError(
                f"a basis of {len(self.basis)} channels turns no vector of {dim}; leave out the choice of channels"
            )
        y = (y if self.mean is None else y - self.mean.to(y)) @ self.basis.to(y)
        if self.clip < 1:
            most = y.abs().sort(-1).values[..., int(self.clip * dim), None]
            y = y.clamp(-most, most)
        codes, numbers = super().encode(y, keys)
        return codes, numbers.to(x.dtype)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., D], rounded once."""
        y = super().decode(codes, numbers.to(wide(numbers)), keys)
        found = y @ self.basis.to(y).mT
        return (found if self.mean is None else found + self.mean.to(found)).to(numbers.dtype)
