"""Middle K and V in 2, 3, 4 or 8 bits (KIVI, section 3): a codec of pages.

A *cell* is `group` numbers that share a scale and a zero point: tokens of one channel in K, channels of one token in V.
KIVI keeps a residual of recent tokens
whole until they fill a group. Here the window is that residual: tokens are quantised once, when they leave it, `flush`
at a time.

A page of 64 tokens is a plane of codes, then one of *scales*: every cell's scale and zero point, in the model's dtype.

               codes, bytes                                     scales
    K, 8 bits  [64, C]                                          [64 / group, C / 2, 2, 2]
       4 bits  [32, C], a byte for tokens t and t + 32
       2 bits  [32, C / 2], also for channels c and c + C / 2
       1 bit   [32, C / 4], also for channels C / 4 apart
    V          [D bits / 8, 64], for channels D bits / 8 apart  [D / group, 32, 2, 2]
       1 bit   [D / 4, 32], for channels D / 4 apart and tokens t and t + 32

A code of 3 bits lies in two planes: its lower 2 bits as codes of 2, then its upper one.

A byte holds codes of numbers that lie far apart, the first in the lowest bits. So the codes of a byte belong to
different products of the kernel, and one load of bytes is an operand of each. Neighbours in memory are numbers over
which a product sums, and a GPU computes with two of them at a time: so of two cells, both scales come first, then both
zero points. C is the number of kept channels, rounded up to 16, so that lines are whole words; the others are zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import PLANES, Folds, PageCodec, PageSegment, fold, unfold
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up
from leank.precision import ROOM

# By bits, how codes join in the bytes of a page of K, [64, C], and of V, [D, 64].
K_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-1, 2), (-2, 4)), 1: ((-1, 2), (-1, 1), (-2, 4))}
V_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-2, 4), (-2, 2)), 1: ((-2, 2), (-2, 1), (-1, 4))}


def quantise(x: Tensor, group: int, top: int | Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., A, N] and scales [..., A / group, N, 2] of x [..., A, N], whose cells lie along A.

    code = round((x - zero) / scale), with zero = min and scale = (max - min) / top. The scale of a cell of equal
    numbers is 0.

    top: the largest code, 2^bits - 1, of all or of each of the N, [N] or [..., 1, 1, N]
    """
    scales = grid(x, group, top)
    return coded(x, scales, group, top), scales


def grid(x: Tensor, group: int, top: int | Tensor) -> Tensor:
    """The scales and zero points [..., A / group, N, 2] of `quantise`."""
    low, high = torch.aminmax(x.unflatten(-2, (-1, group)), dim=-2, keepdim=True)
    scale = (high.to(_wide(x)) - low.to(_wide(x))) / _top_of(x, top)
    return torch.stack([scale.to(x.dtype).squeeze(-2), low.squeeze(-2)], -1)


def coded(x: Tensor, scales: Tensor, group: int, top: int | Tensor) -> Tensor:
    """The codes uint8 [..., A, N] of x on the levels of scales and zero points, which others may have rounded."""
    scale, zero = scales.to(_wide(x)).unsqueeze(-3).unbind(-1)
    steps = (x.to(_wide(x)).unflatten(-2, (-1, group)) - zero) / torch.where(scale == 0, 1, scale)
    most = _top_of(x, top)
    return torch.clamp(steps.round(), torch.zeros_like(most), most).to(torch.uint8).flatten(-3, -2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _top_of(x: Tensor, top: int | Tensor) -> Tensor:
    """The largest code as a tensor, because CUDA divides by a Python number inexactly."""
    return top.to(_wide(x)) if isinstance(top, Tensor) else x.new_full((), top, dtype=_wide(x))


def restore(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """The numbers x̂ = code * scale + zero, rounded once, of codes and scales from `quantise`."""
    scale, zero = scales.to(torch.promote_types(scales.dtype, torch.float32)).unsqueeze(-3).unbind(-1)
    return (codes.unflatten(-2, (-1, group)) * scale + zero).to(scales.dtype).flatten(-3, -2)


@dataclass(frozen=True)
class Packing(PageCodec):
    """KIVI's codec. Raises ValueError for other numbers."""

    bits: int = 2  # of a number, 2, 3, 4 or 8
    group: int = 32  # numbers in a cell, a divisor of 64 that fills whole bytes

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(f"bits={self.bits} must be 2, 3, 4 or 8")
        if self.group < 1 or PAGE % self.group or self.group * self.bits % 8:
            raise ValueError(f"group={self.group} must divide {PAGE} and be at least {8 // self.bits}; KIVI uses 32")

    def check(self, head_dim: int) -> None:
        """Raise ValueError unless whole groups fill a token's channels."""
        if head_dim % self.group:
            raise ValueError(f"group={self.group} does not divide head_dim={head_dim}; choose a smaller group")

    def segment(self, extent: Extent) -> PageSegment:
        self.check(extent.head_dim)
        return super().segment(extent)

    def room(self, channels: Count) -> Count:
        """Channels of K for which a page has room when so many are kept."""
        return round_up(channels, ROOM)

    def cell(self, dtype: torch.dtype) -> int:
        """Bytes of a cell: group * bits / 8 of codes, then scale and zero point."""
        return self.group * self.bits // 8 + 2 * dtype.itemsize

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise` in this codec's bits and groups."""
        return quantise(x, self.group, 2**self.bits - 1)

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """`restore` of this codec's groups."""
        return restore(codes, scales, self.group)

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d], and scales [R, n / group, channels, 2] of K, [R, n, D / group, 2] of V."""
        if keys:
            return self.quantise(x)
        codes, scales = self.quantise(x.mT)
        return codes.mT, scales.transpose(-3, -2)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        return self.restore(codes, numbers) if keys else self.restore(codes.mT, numbers.transpose(-3, -2)).mT

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        scales = PAGE // self.group * 2 * dtype.itemsize
        of_codes = PAGE * self.bits // 8
        room = self.room(channels)
        return (room * of_codes, room * scales), (head_dim * of_codes, head_dim * scales)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        if keys:
            spare = self.room(codes.shape[-1]) - codes.shape[-1]
            codes, numbers = pad(codes, (0, spare)), pad(numbers, (0, 0, 0, spare))
        else:
            codes, numbers = codes.mT, numbers.transpose(-3, -2)
        planes, lower = [], 0
        for bits in PLANES[self.bits]:
            part = codes >> lower & 2**bits - 1
            planes.append(fold(part, (K_FOLDS if keys else V_FOLDS)[bits]).flatten(-2))
            lower += bits
        return torch.cat(planes, -1), numbers.unflatten(-2, (-1, 2)).mT.flatten(-4)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        parts, found, lower = PLANES[self.bits], [], 0
        for bits, plane in zip(parts, codes.split([codes.shape[-1] // self.bits * b for b in parts], -1), strict=True):
            height = PAGE // (1 if bits == 8 else 2) if keys else dim * max(bits, 2) // 8
            found.append(unfold(plane.unflatten(-1, (height, -1)), (K_FOLDS if keys else V_FOLDS)[bits]) << lower)
            lower += bits
        whole = sum(found[1:], start=found[0])
        if keys:
            scales = numbers.unflatten(-1, (PAGE // self.group, -1, 2, 2)).mT.flatten(-3, -2)
            return whole[..., :dim], scales[..., :dim, :]
        scales = numbers.unflatten(-1, (dim // self.group, PAGE // 2, 2, 2)).mT.flatten(-3, -2)
        return whole.mT, scales.transpose(-3, -2)
