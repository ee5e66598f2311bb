"""Middle K and V rotated, then in 2 or 4 bits without zero points: a packed form beside eval.cache.storage.quantised.

A vector x of a token, its kept channels of K or all of V, is stored as its norm and as codes of the coordinates of its
direction in a random orthonormal basis. The basis is weights, the same for all prompts, and is held by no cache.

A page of 64 tokens is a plane of codes, [64, bytes of a vector], then a plane of norms, [64], in the model's dtype. The
rooms of K and V are those of QuantisedSegment with these pages in them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.folds import VECTOR_FOLDS, fold, unfold
from leank.eval.cache.storage.quantised import Packing, QuantisedSegment
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up


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
class Rotation(Packing):
    """How vectors are packed.

    bits: of a coordinate, 2 or 4
    group: tokens that join together, 1
    seed: of the random bases

    Raises ValueError for other numbers of bits or another group.
    """

    kernels: ClassVar[str | None] = None
    bits: int = 4
    group: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in VECTOR_FOLDS or self.group != 1:
            raise ValueError(f"rotated coordinates have 2 or 4 bits and groups of 1, not {self.bits} and {self.group}")

    def segment(self, extent: Extent) -> RotatedSegment:
        """An empty packed segment; V keeps all its channels."""
        return RotatedSegment(extent, self)

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it."""
        return "the kernel reads keys channel by channel, this method stores them rotated"

    def room(self, channels: Count) -> Count:
        """Coordinates for which a vector has room: whole bytes of them."""
        return round_up(channels, 8 // self.bits)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Any], tuple[int, int]]:
        """For K and for V: bytes of a page's codes, and of its norms."""
        norms = PAGE * dtype.itemsize
        of_k, of_v = self.room(channels) * self.bits // 8 * PAGE, self.room(head_dim) * self.bits // 8 * PAGE
        return (of_k, norms), (of_v, norms)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., bytes], and norms [...] of vectors x [..., d].

        code_j = the nearest centroid's number to sqrt(d) (x R)_j / ||x||
        """
        dim, wide = x.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))
        norm = wide.norm(dim=-1)
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        unit = wide / torch.where(norm > 0, norm, 1)[..., None]
        codes = torch.bucketize(unit @ basis * dim**0.5, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        return fold(pad(codes, (0, self.room(dim) - dim)), VECTOR_FOLDS[self.bits]), norm.to(x.dtype)

    def decode(self, stored: Tensor, norm: Tensor, dim: int) -> Tensor:
        """The vectors x̂ [..., d] = ||x|| / sqrt(d) c R^T of codes and norms, with c the codes' centroids."""
        wide = norm.to(torch.promote_types(norm.dtype, torch.float32))
        basis, levels = (t.to(wide) for t in (rotation(dim, self.seed), centroids(self.bits)))
        found = levels[unfold(stored, VECTOR_FOLDS[self.bits])[..., :dim].long()] @ basis.mT
        return (found * (wide / dim**0.5)[..., None]).to(norm.dtype)


class RotatedSegment(QuantisedSegment):
    """A Segment whose k and v are pages of rotated vectors, uint8."""

    packing: Rotation

    def _of_form(self, extent: Extent) -> RotatedSegment:
        return RotatedSegment(extent, self.packing)

    def _put(self, row: int, head: int, at: int, keys: Tensor, values: Tensor) -> None:
        """Write keys [number, n, channels] and values [number, n, D] of one head of like rows, from token `at` on."""
        for (codes, norms), x in zip(self._planes(row, len(keys), head), (keys, values), strict=True):
            pages = slice(at // PAGE, -(-(at + keys.shape[1]) // PAGE))
            tokens = slice(at % PAGE, at % PAGE + keys.shape[1])
            for plane, new in zip((codes, norms), self.packing.encode(x), strict=True):
                whole = plane[:, pages].flatten(1, 2).clone()
                whole[:, tokens] = new
                plane[:, pages] = whole.unflatten(1, (-1, PAGE))

    def _shaped(self, codes: Tensor, scales: Tensor, channels: int | None) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, bytes] and norms [..., 64] of pages, views; channels: kept ones of K, None = planes of V."""
        width = self.packing.room(self.head_dim if channels is None else channels) * self.packing.bits // 8
        return codes.unflatten(-1, (PAGE, width)), scales

    def _keys(self, codes: Tensor, scales: Tensor, channels: int) -> Tensor:
        """Keys [..., 64, channels] of the planes of pages."""
        return self.packing.decode(codes, scales, channels)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Values [..., D, 64] of the planes of pages."""
        return self.packing.decode(codes, scales, self.head_dim).mT
