"""A middle in the bits that a mask's layout gives each channel (`leank.precision`): a codec of pages.

A page of K is up to four bands, the widest first: of 16 bits, which holds numbers channel by channel, [C, 64], as an
unpacked middle does; of 8 and of 4 bits, a page of KIVI's codec each (`quantised`); and the *narrow* one of 3 and 2
bits. A page of V is KIVI's page of the head's width, or [D, 64] of plain numbers.

The narrow band has two *planes*: the lower two bits of all channels, then the third bit of those that have one, which
come first. Channel c lies in line c // 4. A thread that multiplies has both planes' bits of its lines:

    lower bits  [32, 2, C / 4]  a byte for channels 0 and 1 of a line, or 2 and 3, and for tokens t and t + 32
    third bit   [32, C3 / 4]    a byte for the four channels of a line, and for tokens t and t + 32
    scales      as in `quantised`, of the lines' channels 0, then 2, 1 and 3: in the order of bits

C and C3 are the channels with 2 bits or more, and with 3, rounded up to 16. The tokens of a page of K are in an order
of their own (`tokens_in_lines`), in which those that are multiplied at the same time lie side by side.

    K of a head with 20 channels at 16 bits, 32 at 4, 16 at 3 and 16 at 2, in bfloat16:
    | 64 x 32 numbers | codes of 32 | scales of 32 | lower bits of 32 | third of 16 | scales of 32 |
      4096 bytes        1024          128            512                128           128
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import BandCodec, PageCodec, PageSegment, fold, unfold
from leank.eval.cache.storage.quantised import K_FOLDS, Packing, quantise, restore
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up
from leank.precision import GROUP, ROOM, WHOLE, Precision, counts, key_bytes, value_bytes, value_group


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


class Even(Packing):
    """A band of channels of K in 8 or 4 bits."""

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return super().pack(tokens_in_lines(codes), numbers, keys)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        found, scales = super().unpack(codes, numbers, dim, keys)
        return tokens_from_lines(found), scales


@dataclass(frozen=True)
class Narrow(PageCodec):
    """A band of channels of K in 3 bits, then in 2.

    channels, third: how many there are, and how many have a third bit
    """

    channels: int
    third: int

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d] and scales [R, n / GROUP, d, 2]; see `quantise`."""
        top = torch.full((self.channels,), 3)
        top[: self.third] = 7
        return quantise(x, GROUP, top.to(x.device))

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors [..., n, d] of codes and scales from `encode`."""
        return restore(codes, numbers, GROUP)

    @property
    def _sizes(self) -> list[int]:
        return [round_up(self.channels, ROOM) * PAGE // 4, round_up(self.third, ROOM) * PAGE // 8]

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Any], tuple[int, int]]:
        """For K: bytes of a page's planes, and of its scales; there is no V of this form."""
        return (channels * 0 + sum(self._sizes), round_up(self.channels, ROOM) * 2 * dtype.itemsize), (0, 0)

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
        scales = numbers.unflatten(-1, (1, -1, 2, 2)).mT.flatten(-3, -2)
        return tokens_from_lines(lower)[..., :dim], _from_lines(scales.mT).mT[..., :dim, :]


def _in_lines(x: Tensor) -> Tensor:
    """The channels of x [..., C] in the order of the bits that they have in a byte: 0, 4, 8, ..., 2, ..., 1, ..., 3."""
    return x.unflatten(-1, (-1, 2, 2)).permute(*range(x.dim() - 1), -1, -2, -3).flatten(-3)


def _from_lines(x: Tensor) -> Tensor:
    """What `_in_lines` took apart, in a new tensor."""
    return x.unflatten(-1, (2, 2, -1)).permute(*range(x.dim() - 1), -1, -2, -3).flatten(-3)


BANDS = 4  # of 16, 8 and 4 bits, and the narrow one
Head = tuple[int, ...]  # channels in 16, 8 and 4 bits, narrow ones, those of them with 3 bits, and the bits of V


@dataclass(frozen=True)
class Banded(BandCodec):
    """The codec of one layer of a layout."""

    key_bits: tuple[tuple[int, ...], ...]  # of every channel of K, [H][D]
    value_bits: tuple[int, ...]  # of V, [H]
    model_heads: tuple[Head, ...]  # of all layers, without empty ones: kernels are compiled for a model
    group = GROUP

    def widths(self) -> dict[str, Tensor]:
        """Both fields, uint8, by name."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.uint8) for name in ("key_bits", "value_bits")}

    @property
    def order(self) -> Tensor:
        """The widest channels stand first."""
        return self.widths()["key_bits"]

    @cached_property
    def counts(self) -> np.ndarray:
        """Channels in 16, in 8 and in 4 bits, narrow ones, and those of them with 3 bits, [H, 5]."""
        return counts(self.order).numpy()

    @cached_property
    def heads(self) -> list[Head]:
        """What each head stores, [H]."""
        return [(*of_head, bits) for of_head, bits in zip(self.counts.tolist(), self.value_bits, strict=True)]

    @property
    def head_dim(self) -> int:
        """D."""
        return len(self.key_bits[0])

    @cached_property
    def _bands(self) -> list[list[tuple[PageCodec, int]]]:
        found = []
        for *of_bands, third in self.counts.tolist():
            bands = zip(
                (WHOLE_BAND, Even(8, GROUP), Even(4, GROUP), Narrow(of_bands[-1], third)), of_bands, strict=True
            )
            found.append([(codec, n) for codec, n in bands if n] or [(WHOLE_BAND, 0)])
        return found

    @cached_property
    def _values(self) -> list[PageCodec]:
        return [_packing(bits, value_group(self.head_dim)) for bits in self.value_bits]

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        return self._bands[head]

    def of_values(self, head: int) -> PageCodec:
        return self._values[head]

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        k = key_bytes([*self.counts.T], dtype.itemsize)
        v = value_bytes(np.array(self.value_bits), head_dim, dtype.itemsize)
        return np.broadcast_to(k, count.shape), np.broadcast_to(v, count.shape)

    def segment(self, extent: Extent) -> PageSegment:
        """An empty segment. Raises ValueError if other channels are kept than have bits."""
        if (extent.channels.count != self.counts[:, :BANDS].sum(-1)).any():
            raise ValueError("a layout of bits says itself which channels are kept; leave out another choice of them")
        return super().segment(extent)


def check_flush(flush: int) -> None:
    """Raise ValueError unless whole groups of tokens leave the window."""
    if flush % GROUP:
        raise ValueError(
            f"flush={flush} must be a multiple of {GROUP}, tokens that a mask with bits per channel stores together; "
            f"set flush to {round_up(flush, GROUP)}"
        )


def _packing(bits: int, group: int) -> PageCodec:
    return WHOLE_BAND if bits == WHOLE else Packing(bits, group)


def codecs(precision: Precision) -> list[Banded]:
    """The codec of every layer."""
    layers = [
        Banded(tuple(map(tuple, of_keys)), tuple(of_values), ())
        for of_keys, of_values in zip(precision.key_bits.tolist(), precision.value_bits.tolist(), strict=True)
    ]
    heads = tuple(head for layer in layers for head in layer.heads if any(head[:BANDS]))
    return [replace(layer, model_heads=heads) for layer in layers]
