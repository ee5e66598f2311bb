"""TurboQuant: the middle rotated at random, then 2, 3 or 4 bits per coordinate, without zero points.

"TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", arXiv 2504.19874, section 3.1; and the form
in which vLLM serves it.
"""

import functools
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import BandCodec, OfHeads, PageCodec
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.segment import Count as Channels
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.typed import Count, OneOf, Seed


@method("turboquant")
@dataclass(frozen=True)
class TurboQuant(Bits):
    """Every token's vector x, of d kept channels of K or of V, is stored as its norm and one code per coordinate.

      code_j = argmin_i | sqrt(d) (x R)_j / ||x|| - c_i |,   x̂ = ||x|| / sqrt(d) c_code R^T

    R is a random orthogonal matrix, so that the coordinates of any x are nearly standard normal and independent, and c
    are the 2^bits levels that are best for such numbers (Lloyd and Max). Nothing depends on the data: no calibration,
    no groups of tokens, and 16 bits per vector beside the codes, where KIVI has 32 per group.

    vLLM's form (`turboquant_4bit_nc`, `turboquant_k3v4_nc` and `turboquant_3bit_nc`, named as its kv_cache_dtype) has
    three changes. A vector that is read back has its own length (`norm_correction`):

      x̂ = ||x|| c_code / ||c_code|| R^T

    V is not rotated; each token's V is on an even grid from its least to its largest number (`values`). And the first
    and last two layers stay in the model's dtype (`skip`).

    Deviations
    - This is the paper's quantiser of least mean squared error (its algorithm 1). Its algorithm 2, which makes inner
      products unbiased by one more bit of the residual's projection, is left out, in vLLM too.
    - The paper gives outlier channels more bits; here all coordinates have the same number.
    - vLLM turns by a Hadamard matrix, which is not there for every number of kept channels; here R is random.
    - vLLM skips no layer of a model with layers of another kind than attention; here `skip` counts all layers.
    - Norms, scales and least numbers have the model's dtype, in vLLM float16.
    - The newest tokens stay whole in the window, and the first in the sink.
    - Plain PyTorch turns the vectors back: answers and bytes are the method's, time is not.
    """

    bits: Annotated[int, OneOf(2, 3, 4)] = 4  # of every coordinate of K, and of V without `value_bits`
    seed: Seed = 0  # seed of the rotations; heads of as many channels share one
    norm_correction: bool = False  # whether vectors come back in their own length
    values: Annotated[str, OneOf("rotated", "even")] = "rotated"  # how V is stored, as K or on an even grid of its own
    value_bits: Annotated[int | None, OneOf(2, 3, 4, None)] = None  # bits of every number of V; None is `bits`
    skip: Count = 0  # layers that stay whole at either end, at most half of all layers

    def sized(self, index: int, held: Held) -> BandCodec | None:
        return None if self.whole(len(held.middle))[index] else self._codec()

    def whole(self, layers: int) -> list[bool]:
        """Which of so many layers stay in the model's dtype."""
        ends = min(self.skip, layers // 2)
        return [not ends <= index < layers - ends for index in range(layers)]

    def of_layer(self, index: int, prefill: Prefill) -> BandCodec | None:
        return None if self.whole(len(prefill.layers))[index] else self._codec()

    def _codec(self) -> BandCodec:
        keys, bits = Rotation(self.bits, self.seed, self.norm_correction), self.value_bits or self.bits
        if self.values == "even":
            return OfHeads(((keys, Even(bits)),))
        return keys if bits == self.bits else OfHeads(((keys, replace(keys, bits=bits)),))


@functools.lru_cache(maxsize=512)
def rotation(dim: int, seed: int) -> Tensor:
    """A random orthogonal matrix [dim, dim], float64, uniform over all of them (Haar)."""
    generator = torch.Generator().manual_seed(seed * 1009 + dim)
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


@functools.cache
def centroids(bits: int) -> Tensor:
    """The 2^bits levels [2^bits], float64, ascending, that lie nearest to a standard normal number (Lloyd and Max)."""
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
    """A vector's norm, and codes of its direction in a random orthonormal basis, the same for all prompts."""

    bits: int = 4  # of a coordinate, 2, 3 or 4
    seed: int = 0  # of the random bases
    norm_correction: bool = False  # whether a vector comes back in its own length
    holds = "rotated vectors"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """The nearest centroids to sqrt(d) (x R)_j / ||x||, uint8 [..., d], and ||x|| [...]."""
        dim, wide = x.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))
        norm = wide.norm(dim=-1)
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        unit = wide / torch.where(norm > 0, norm, 1)[..., None]
        codes = torch.bucketize(unit @ basis * dim**0.5, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return codes, norm.to(x.dtype)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., d] = ||x|| / sqrt(d) c R^T, c the codes' centroids; ||c|| for sqrt(d) if corrected."""
        dim, wide = codes.shape[-1], numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        levels = levels.sign() if dim == 1 else levels  # one coordinate is 1 or -1, and nothing like normal
        found = levels[codes.long()]
        length = found.norm(dim=-1) if self.norm_correction else dim**0.5
        return (found @ basis.mT * (wide / length)[..., None]).to(numbers.dtype)


@dataclass(frozen=True)
class Even(PageCodec):
    """A vector's numbers on an even grid from its least to its largest one.

    code = floor((x - least) / s + 1/2),  s = (largest - least) / (2^bits - 1),  x̂ = code s + least
    """

    bits: int = 4  # of a number, 2, 3 or 4
    holds = "one grid per vector"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., d], and s and the least number, [..., 2]."""
        low, high = (y.to(torch.promote_types(x.dtype, torch.float32)) for y in torch.aminmax(x, dim=-1, keepdim=True))
        scale = (high - low) / (2**self.bits - 1)
        codes = ((x - low) / torch.where(scale > 0, scale, 1) + 0.5).floor().clamp(max=2**self.bits - 1)
        return codes.to(torch.uint8), torch.cat([scale, low], -1).to(x.dtype)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., d], rounded once."""
        scale, low = numbers.to(torch.promote_types(numbers.dtype, torch.float32))[..., None].unbind(-2)
        return (codes * scale + low).to(numbers.dtype)

    def pages(
        self, head_dim: int, channels: Channels, dtype: torch.dtype
    ) -> tuple[tuple[Channels, int], tuple[int, int]]:
        (k, numbers), (v, _) = super().pages(head_dim, channels, dtype)
        return (k, 2 * numbers), (v, 2 * numbers)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return super().pack(codes, numbers, keys)[0], numbers.flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        return super().unpack(codes, numbers.unflatten(-1, (PAGE, 2)), dim, keys)
