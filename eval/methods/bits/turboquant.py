"""TurboQuant: the middle rotated at random, then 2 or 4 bits per coordinate, without zero points.

"TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv 2504.19874, section 3.1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import PageCodec
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.typed import OneOf, Seed


@method("turboquant")
@dataclass(frozen=True)
class TurboQuant(Bits):
    """Every token's vector x, of d kept channels of K or of V, is stored as its norm and one code per coordinate.

      code_j = argmin_i | sqrt(d) (x R)_j / ||x|| - c_i |,   x̂ = ||x|| / sqrt(d) c_code R^T

    R is a random orthogonal matrix, so that the coordinates of any x are nearly standard normal and independent, and c
    are the 2^bits levels that are best for such numbers (Lloyd and Max). Nothing depends on the data: no calibration,
    no groups of tokens, and 16 bits per vector beside the codes, where KIVI has 32 per group.

    Deviations
    - This is the paper's quantiser of least mean squared error (its algorithm 1). Its algorithm 2, which makes inner
      products unbiased by one more bit of the residual's projection, is left out.
    - The paper gives outlier channels more bits; here all coordinates have the same number.
    - The newest tokens stay whole in the window, and the first in the sink.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.

    Settings
    bits: 2 or 4, default 4: bits of every coordinate of K and V.
    seed: int, default 0: seed of the rotations; heads of as many channels share one.
    """

    bits: Annotated[int, OneOf(2, 4)] = 4
    seed: Seed = 0

    def packed(self, held: Held) -> float:
        """Bytes of the middle: `bits` per coordinate, in whole bytes of every vector, and a norm per vector."""
        per_byte = 8 // self.bits
        vectors = [held.middle * (-(-n // per_byte) + held.itemsize * (n > 0)) for n in (held.k, held.v)]
        return float(sum(n.sum() for n in vectors))

    def of_layer(self, index: int, prefill: Prefill) -> Rotation:
        return Rotation(self.bits, seed=self.seed)


@functools.lru_cache(maxsize=512)
def rotation(dim: int, seed: int) -> Tensor:
    """A random orthogonal matrix [dim, dim], float64, uniform over all of them (Haar)."""
    generator = torch.Generator().manual_seed(seed * 1009 + dim)
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


@functools.cache
def centroids(bits: int) -> Tensor:
    """The 2^bits levels [2^bits], float64, ascending, that lie nearest to a standard normal number (Lloyd and Max).

    Every level is the mean of the numbers that are nearer to it than to any other.
    """
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
    levels = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(2000):
        ends = pad((levels[1:] + levels[:-1]) / 2, (1, 1))
        ends[0], ends[-1] = -torch.inf, torch.inf
        density, below = normal.log_prob(ends).exp(), normal.cdf(ends)
        levels = -density.diff() / below.diff()
    return levels


@dataclass(frozen=True)
class Rotation(PageCodec):
    """A vector's norm, and codes of the coordinates of its direction in a random orthonormal basis.

    The basis is weights, the same for all prompts, and is held by no cache.

    bits: of a coordinate, 2 or 4
    seed: of the random bases
    """

    bits: int = 4
    seed: int = 0

    @property
    def why_not_kernel(self) -> str | None:
        return "the kernel reads keys channel by channel, this method stores them rotated"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., d], and norms [...] of vectors x [..., d].

        code_j = the nearest centroid's number to sqrt(d) (x R)_j / ||x||
        """
        dim, wide = x.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))
        norm = wide.norm(dim=-1)
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        unit = wide / torch.where(norm > 0, norm, 1)[..., None]
        codes = torch.bucketize(unit @ basis * dim**0.5, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return codes, norm.to(x.dtype)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., d] = ||x|| / sqrt(d) c R^T of codes and norms, with c the codes' centroids."""
        dim, wide = codes.shape[-1], numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        levels = levels.sign() if dim == 1 else levels  # one coordinate is 1 or -1, and nothing like normal
        return (levels[codes.long()] @ basis.mT * (wide / dim**0.5)[..., None]).to(numbers.dtype)
