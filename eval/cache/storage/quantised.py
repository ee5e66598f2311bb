"""The page format of a middle in few bits: rounding (KIVI, section 3), and where codes and scales lie.

A *quantisation group* is `group` numbers that share a scale and a zero point: tokens of one channel in K, channels of
one token in V. KIVI keeps a residual of recent tokens whole until they fill a group. Here the window is that residual:
tokens are quantised once, when they leave it, `flush` at a time.

A page is 64 tokens of one head. A page of K is up to four bands, the widest first: of 16, 8 and 4 bits, and the
*narrow* one of 3 and 2. KIVI has one band (`Packing`), a layout of bits those that its channels need (`banded`). A band
is a plane of codes, or two, then one of *scales*: every group's scale and zero point, in the model's dtype, or packed
into a word of 16 bits.

               codes, bytes                                     scales
    K, 16 bits [64, C] numbers, no codes
       8 bits  [64, C]                                          [64 / group, C / 2, 2, 2]
       4 bits  [32, C], a byte for tokens t and t + 32          the same
       narrow  [32, 2, C / 4], the lower two bits: a byte for   the same, of the lines' channels 0, then 2, 1 and 3
               channels 0 and 1 of a line, or 2 and 3, and
               for tokens t and t + 32; then, of those with 3
               bits, [32, C3 / 4], the third one: a byte for
               the four channels of a line, and two tokens
    V, 16 bits [D, 64] numbers
       8, 4, 2 [D bits / 8, 64], for channels D bits / 8 apart  [D / group, 32, 2, 2]
       3 bits  as 2 bits, then [D / 4, 32], the third one: for
               channels D / 4 apart and tokens t and t + 32

C and C3 are the channels of a band, and those of them with 3 bits, rounded up to 16, so that lines are whole words; the
others are zeros. Channel c of the narrow band lies in line c // 4, those with 3 bits first. The tokens of a page of K
are in an order of their own (`tokens_in_lines`), in which those that are multiplied at the same time lie side by side.

A byte holds codes of numbers that lie far apart, the first in the lowest bits. So the codes of a byte belong to
different products of the kernel, and one load of bytes is an operand of each. Neighbours in memory are numbers over
which a product sums, and a GPU computes with two of them at a time: so of two groups, both scales come first, then both
zero points. Packed scales lie in the same order, a word for each group.

    K of a head with 20 channels at 16 bits, 32 at 4, 16 at 3 and 16 at 2, in bfloat16, in groups of 64:
    | 64 x 32 numbers | codes of 32 | scales of 32 | lower bits of 32 | third of 16 | scales of 32 |
      4096 bytes        1024          128            512                128           128
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import PLANES, Folds, PageCodec, PageSegment, fold, unfold
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up
from leank.precision import COUNTED, GROUP, ROOM, WHOLE, key_bytes, scale_bytes, value_bytes

# By bits, how codes join in the bytes of a page of K, [64, C] or [64, C in the order of bits], and of V, [D, 64].
K_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-1, 2), (-2, 4)), 1: ((-1, 2), (-1, 1), (-2, 4))}
V_FOLDS: dict[int, Folds] = {8: (), 4: ((-2, 4),), 2: ((-2, 4), (-2, 2)), 1: ((-2, 2), (-2, 1), (-1, 4))}


# Of a packed scale and zero point, a word: the sign, the largest magnitude of the zero point, and what is no number.
SIGN, MOST_ZERO, NAN = -(2**15), 63, 0x7E00
LEAST_SCALE, MOST_SCALE = 2.0**-14, 63488.0
# channels of K in each of `COUNTED`: in 16, 8 and 4 bits, narrow ones, those of them with 3 bits; then the bits of V
Head = tuple[int, ...]


def quantise(x: Tensor, group: int, top: int | Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., A, N] and scales [..., A / group, N, 2] of x [..., A, N], whose groups lie along A.

    code = round((x - zero) / scale), with zero = min and scale = (max - min) / top. The scale of a group of equal
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


def quantise_packed(x: Tensor, group: int, top: int | Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., A, N] and words int16 [..., A / group, N, 1] of x [..., A, N]; see `quantise`.

    A word is a float16 number. Its sign and its lower six bits, a magnitude, are an integer z from -63 to 63; the rest
    is the scale s, which has four bits of fraction and is at least 2^-14. The zero point is z u s, u = `zero_unit`:

        s = max((max - min) / (top + slack), -min / 63 u, max / (63 u + top)), rounded up
        z = round(min / u s), or rounded down where u > 1
        code = round((x - z u s) / s)

    Where u < 1, slack is u / 2, and the least and the largest number lie at most u s beyond the levels, no more than
    the s / 2 by which others miss theirs. Else it is -u, and none lies beyond. The word of a group whose numbers are
    not finite is NaN.
    """
    cells = x.to(_wide(x)).unflatten(-2, (-1, group))
    low, high = torch.aminmax(cells, dim=-2, keepdim=True)
    most = _top_of(x, top)
    unit = zero_unit(most)
    fine, reach = unit < 1, MOST_ZERO * unit
    need = (high - low) / (most + torch.where(fine, unit / 2, -unit))
    need = need.maximum(-low / reach).maximum(high / (reach + most))
    fraction, exponent = torch.frexp(need.nan_to_num(MOST_SCALE).clamp(LEAST_SCALE, MOST_SCALE))
    scale = torch.ldexp((fraction * 32).ceil(), exponent - 5)  # fraction is in [1/2, 1)
    zero = low / (unit * scale)
    zero = torch.where(fine, zero.round(), zero.floor()).nan_to_num(0).clamp(-MOST_ZERO, MOST_ZERO)
    codes = torch.clamp(((cells - zero * unit * scale) / scale).round(), torch.zeros_like(most), most)
    words = scale.to(torch.float16).view(torch.int16) | zero.abs().to(torch.int16)
    words = torch.where(zero < 0, words | SIGN, words).masked_fill(~torch.isfinite(high - low), NAN)
    return codes.to(torch.uint8).flatten(-3, -2), words.squeeze(-2)[..., None]


def restore_packed(codes: Tensor, words: Tensor, group: int, top: int | Tensor) -> Tensor:
    """The numbers code * s + z u s, float32 and exact, of codes and words from `quantise_packed`."""
    words = words.mT  # [..., A / group, 1, N]
    scale = (words & ~(SIGN | MOST_ZERO)).view(torch.float16).float()
    zero = torch.where(words < 0, -1, 1) * (words & MOST_ZERO)
    return ((codes.unflatten(-2, (-1, group)) + zero * zero_unit(_top_of(scale, top))) * scale).flatten(-3, -2)


def zero_unit(top: Tensor) -> Tensor:
    """By what share of a packed scale zero points lie apart, for codes up to top: 1/4, 1/2 at 4 bits, 8 at 8 bits."""
    return ((top + 1) / 32).clamp(min=0.25)


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


def tokens_in_lines(x: Tensor) -> Tensor:
    """The tokens of a page of K, axis -2 of x [..., 64, d], in the order of its lines.

    Lines 16 w + 8 e + 2 i + b of a half hold its tokens 8 i + 4 w + 2 b + e. So the eight lines that a product takes at
    a time follow each other, and a thread that has their results has four neighbours of V, a word. See `codes.cu`.
    """
    return x.unflatten(-2, (2, 4, 2, 2, 2)).transpose(-5, -4).transpose(-4, -2).transpose(-3, -2).flatten(-6, -2)


def tokens_from_lines(x: Tensor) -> Tensor:
    """The tokens of which `tokens_in_lines` made lines."""
    return x.unflatten(-2, (2, 2, 2, 4, 2)).transpose(-3, -2).transpose(-4, -2).transpose(-5, -4).flatten(-6, -2)


class Whole(PageCodec):
    """A band in the model's dtype: no codes; K lies token by token, V channel by channel, as products sum."""

    bits = WHOLE

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return x.new_empty(*x.shape[:-1], 0, dtype=torch.uint8), x

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        return numbers

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        size = PAGE * dtype.itemsize
        return (channels * 0, round_up(channels, ROOM) * size), (0, head_dim * size)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        lines = pad(tokens_in_lines(numbers), (0, -numbers.shape[-1] % ROOM)) if keys else numbers.mT
        return codes.flatten(-2), lines.flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        if keys:
            found = tokens_from_lines(numbers.unflatten(-1, (PAGE, round_up(dim, ROOM))))[..., :dim]
        else:
            found = numbers.unflatten(-1, (dim, PAGE)).mT
        return codes[..., None, :].expand(*codes.shape[:-1], PAGE, 0), found


WHOLE_BAND = Whole()


@dataclass(frozen=True)
class Narrow(PageCodec):
    """A band of channels of K in 3 bits, then in 2.

    channels, third: how many there are, and how many have a third bit
    """

    channels: int
    third: int
    group: int = GROUP  # tokens that share a scale
    packed: bool = False  # whether scales are

    @property
    def numbers_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return torch.int16 if self.packed else None

    def _top(self, device: torch.device) -> Tensor:
        top = torch.full((self.channels,), 3)
        top[: self.third] = 7
        return top.to(device)

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d] and scales [R, n / group, d, 2], packed ones [R, n / group, d, 1]; see `quantise`."""
        return (quantise_packed if self.packed else quantise)(x, self.group, self._top(x.device))

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors [..., n, d] of codes and scales from `encode`."""
        if self.packed:
            return restore_packed(codes, numbers, self.group, self._top(codes.device))
        return restore(codes, numbers, self.group)

    @property
    def _sizes(self) -> list[int]:
        return [round_up(self.channels, ROOM) * PAGE // 4, round_up(self.third, ROOM) * PAGE // 8]

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Any], tuple[int, int]]:
        """For K: bytes of a page's planes, and of its scales; there is no V of this form."""
        scales = PAGE // self.group * scale_bytes(dtype.itemsize, self.packed)
        return (channels * 0 + sum(self._sizes), round_up(self.channels, ROOM) * scales), (0, 0)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Planes of whole pages."""
        spare = -self.channels % ROOM
        codes, scales = pad(tokens_in_lines(codes), (0, spare)), pad(numbers, (0, 0, 0, spare)).mT
        parts = (codes & 3, 2), (codes[..., : round_up(self.third, ROOM)] >> 2 & 1, 1)
        planes = [fold(_in_lines(part), K_FOLDS[bits]).flatten(-2) for part, bits in parts]
        return torch.cat(planes, -1), _in_lines(scales).mT.unflatten(-2, (-1, 2)).mT.flatten(-4)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, d] and scales of the planes that `pack` made."""
        lower, third = (
            _from_lines(unfold(plane.unflatten(-1, (PAGE // 2, -1)), K_FOLDS[bits]))
            for plane, bits in zip(codes.split(self._sizes, -1), (2, 1), strict=True)
        )
        lower[..., : third.shape[-1]] |= third << 2
        scales = numbers.unflatten(-1, (PAGE // self.group, -1, 1 if self.packed else 2, 2)).mT.flatten(-3, -2)
        return tokens_from_lines(lower)[..., :dim], _from_lines(scales.mT).mT[..., :dim, :]


def _in_lines(x: Tensor) -> Tensor:
    """The channels of x [..., C] in the order of the bits that they have in a byte: 0, 4, 8, ..., 2, ..., 1, ..., 3."""
    return x.unflatten(-1, (-1, 2, 2)).permute(*range(x.dim() - 1), -1, -2, -3).flatten(-3)


def _from_lines(x: Tensor) -> Tensor:
    """What `_in_lines` took apart, in a new tensor."""
    return x.unflatten(-1, (2, 2, -1)).permute(*range(x.dim() - 1), -1, -2, -3).flatten(-3)


@dataclass(frozen=True)
class Packing(PageCodec):
    """KIVI's codec: every kept channel of K, and V, in as many bits. Raises ValueError for other numbers."""

    bits: int = 2  # of a number, one of PLANES
    group: int = 32  # numbers in a group, a divisor of 64 that fills whole bytes
    packed: bool = field(default=False, kw_only=True)  # whether scales are, as in the bands of a layout

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(f"bits={self.bits} must be one of {', '.join(map(str, sorted(PLANES)))}")
        if self.group < 1 or PAGE % self.group or self.group * self.bits % 8:
            raise ValueError(f"group={self.group} must divide {PAGE} and be at least {8 // self.bits}; KIVI uses 32")

    @property
    def numbers_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return torch.int16 if self.packed else None

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

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise` in this codec's bits and groups."""
        return (quantise_packed if self.packed else quantise)(x, self.group, 2**self.bits - 1)

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """`restore` of this codec's groups."""
        if self.packed:
            return restore_packed(codes, scales, self.group, 2**self.bits - 1)
        return restore(codes, scales, self.group)

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        narrow = Narrow(channels, channels if self.bits == 3 else 0, self.group, packed=self.packed)
        return [(narrow if self.bits < 4 else self, channels)]

    def heads_of(self, count: np.ndarray) -> np.ndarray:
        """What heads store that keep `count` [B, H] channels, one `Head` each, [B, H, n]."""
        return np.stack([*(count * (self.bits in own) for own in COUNTED), np.full_like(count, self.bits)], -1)

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        *of_keys, values = np.moveaxis(self.heads_of(count), -1, 0)
        k = key_bytes(of_keys, dtype.itemsize, self.group, self.packed)
        return k, value_bytes(values, head_dim, dtype.itemsize, self.group, self.packed)

    def model_heads(self, head_dim: int) -> tuple[Head, ...]:
        """Heads of every size for which kernels are compiled."""
        sizes = np.arange(32, head_dim + 1, 32)
        return tuple(map(tuple, self.heads_of(sizes[sizes & sizes - 1 == 0]).tolist()))

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d], and scales [R, n / group, channels, 2] of K, [R, n, D / group, 2] of V; packed: 1, not 2."""
        if keys:
            return self.quantise(x)
        codes, scales = self.quantise(x.mT)
        return codes.mT, scales.transpose(-3, -2)

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        return self.restore(codes, numbers) if keys else self.restore(codes.mT, numbers.transpose(-3, -2)).mT

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        scales = PAGE // self.group * scale_bytes(dtype.itemsize, self.packed)
        of_codes = PAGE * self.bits // 8
        room = self.room(channels)
        return (room * of_codes, room * scales), (head_dim * of_codes, head_dim * scales)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Planes of whole pages, of K in 8 or 4 bits and of V in any."""
        if keys:
            spare = self.room(codes.shape[-1]) - codes.shape[-1]
            codes, numbers = pad(tokens_in_lines(codes), (0, spare)), pad(numbers, (0, 0, 0, spare))
            planes = [fold(codes, K_FOLDS[self.bits]).flatten(-2)]
        else:
            codes, numbers = codes.mT, numbers.transpose(-3, -2)
            planes, lower = [], 0
            for bits in PLANES[self.bits]:
                planes.append(fold(codes >> lower & 2**bits - 1, V_FOLDS[bits]).flatten(-2))
                lower += bits
        return torch.cat(planes, -1), numbers.unflatten(-2, (-1, 2)).mT.flatten(-4)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        each = 1 if self.packed else 2  # numbers of a group
        if keys:
            lines = codes.unflatten(-1, (PAGE * self.bits // 8, -1))
            scales = numbers.unflatten(-1, (PAGE // self.group, -1, each, 2)).mT.flatten(-3, -2)
            return tokens_from_lines(unfold(lines, K_FOLDS[self.bits]))[..., :dim], scales[..., :dim, :]
        parts, found, lower = PLANES[self.bits], [], 0
        for bits, plane in zip(parts, codes.split([codes.shape[-1] // self.bits * b for b in parts], -1), strict=True):
            found.append(unfold(plane.unflatten(-1, (dim * max(bits, 2) // 8, -1)), V_FOLDS[bits]) << lower)
            lower += bits
        scales = numbers.unflatten(-1, (dim // self.group, PAGE // 2, each, 2)).mT.flatten(-3, -2)
        return sum(found[1:], start=found[0]).mT, scales.transpose(-3, -2)
