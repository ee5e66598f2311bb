"""A middle in the bits that a mask's layout gives each channel (`leank.precision`): a codec of pages.

A page of K is one band after the other, the widest first, and each band is a page of KIVI's codec (`quantised`) for as
many channels as have that width; a band of 16 bits holds its numbers channel by channel, [C, 64], as an unpacked middle
does. A page of V is KIVI's page of the head's width, or [64, D] of plain numbers.

    K of a head with 20 channels at 16 bits, 32 at 4 and 16 at 2, in bfloat16:
    | 20 x 64 numbers | codes of 32 | scales of 32 | codes of 16 | scales of 16 |
      2560 bytes        1024          128            256           64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.codecs import BandCodec, PageCodec, PageSegment
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up
from leank.precision import GROUP, KEY_BITS, WHOLE, Precision, value_group


class Whole(PageCodec):
    """A band of numbers in the model's dtype: no codes."""

    bits = WHOLE

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """No codes, [R, n, 0], and the numbers themselves."""
        return x.new_empty(*x.shape[:-1], 0, dtype=torch.uint8), x

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The numbers."""
        return numbers

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        """For K and for V: no bytes of codes, and those of a page's numbers."""
        size = PAGE * dtype.itemsize
        return (channels * 0, channels * size), (0, head_dim * size)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Planes of whole pages: K channel by channel, V token by token."""
        return codes.flatten(-2), (numbers.mT if keys else numbers).flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, 0] and numbers [..., 64, d]."""
        found = numbers.unflatten(-1, (dim, PAGE)).mT if keys else numbers.unflatten(-1, (PAGE, dim))
        return codes[..., None, :].expand(*codes.shape[:-1], PAGE, 0), found


WHOLE_BAND = Whole()


@dataclass(frozen=True)
class Banded(BandCodec):
    """The codec of one layer of a layout.

    key_bits: of every channel of K, [H][D]
    value_bits: of V, [H]
    """

    key_bits: tuple[tuple[int, ...], ...]
    value_bits: tuple[int, ...]
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
        """Channels of every band, [H, bands], the widest band first: 16, 8, 4, 3 and 2 bits."""
        bits = np.array(self.key_bits)
        return np.stack([(bits == width).sum(-1) for width in reversed(KEY_BITS[1:])], -1)

    @cached_property
    def _bands(self) -> list[list[tuple[PageCodec, int]]]:
        codecs = [_packing(width, GROUP) for width in reversed(KEY_BITS[1:])]
        found = [[(c, n) for c, n in zip(codecs, of_head, strict=True) if n] for of_head in self.counts.tolist()]
        return [of_head or [(WHOLE_BAND, 0)] for of_head in found]

    @cached_property
    def _values(self) -> list[PageCodec]:
        return [_packing(bits, value_group(len(self.key_bits[0]))) for bits in self.value_bits]

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        """A codec and the number of channels of each band that the head has."""
        return self._bands[head]

    def of_values(self, head: int) -> PageCodec:
        """The codec of the head's V."""
        return self._values[head]

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of a page of K and of V; the numbers of kept channels are the layout's."""
        k = [sum(sum(codec.pages(head_dim, n, dtype)[0]) for codec, n in bands) for bands in self._bands]
        v = [sum(codec.pages(head_dim, 0, dtype)[1]) for codec in self._values]
        return np.broadcast_to(k, count.shape), np.broadcast_to(v, count.shape)

    def segment(self, extent: Extent) -> PageSegment:
        """An empty segment. Raises ValueError if other channels are kept than have bits."""
        if (extent.channels.count != self.counts.sum(-1)).any():
            raise ValueError("a layout of bits says itself which channels are kept; leave out another choice of them")
        return super().segment(extent)

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it, or None."""
        return "no kernel reads bands of several widths"


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
    keys, values = precision.key_bits.tolist(), precision.value_bits.tolist()
    return [
        Banded(tuple(map(tuple, of_keys)), tuple(of_values)) for of_keys, of_values in zip(keys, values, strict=True)
    ]
