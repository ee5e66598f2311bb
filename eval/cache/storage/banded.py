"""A middle in the bits that a mask's layout gives each channel (`leank.precision`): a codec of pages (`quantised`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.codecs import BandCodec, PageCodec, PageSegment
from leank.eval.cache.storage.quantised import WHOLE_BAND, Head, Narrow, Packing
from leank.eval.cache.storage.segment import Extent, round_up
from leank.precision import BANDS, GROUP, WHOLE, Precision, counts, key_bytes, value_bytes, value_group


@dataclass(frozen=True)
class Banded(BandCodec):
    """The codec of one layer of a layout."""

    key_bits: tuple[tuple[int, ...], ...]  # of every channel of K, [H][D]
    value_bits: tuple[int, ...]  # of V, [H]
    every_head: tuple[Head, ...]  # of all layers, without empty ones: kernels are compiled for a model
    packed: bool = False  # whether scales are
    group = GROUP

    def widths(self) -> dict[str, Tensor]:
        """Both fields, uint8, by name."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.uint8) for name in ("key_bits", "value_bits")}

    def tensors(self) -> dict[str, Tensor]:
        """What the codec is made of, by name: its widths, and "packed" where scales are."""
        return self.widths() | ({"packed": torch.tensor(True)} if self.packed else {})

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

    def heads_of(self, count: np.ndarray) -> np.ndarray:
        """The same as an array [1, H, n]; count: [B, H], channels kept, which the layout says itself."""
        return np.array(self.heads)[None]

    def model_heads(self, head_dim: int) -> tuple[Head, ...]:
        """Heads for which kernels are compiled."""
        return self.every_head

    @cached_property
    def _bands(self) -> list[list[tuple[PageCodec, int]]]:
        found = []
        for *of_bands, third in self.counts.tolist():
            even = (Packing(bits, GROUP, packed=self.packed) for bits in (8, 4))
            narrow = Narrow(of_bands[-1], third, GROUP, self.packed)
            bands = zip((WHOLE_BAND, *even, narrow), of_bands, strict=True)
            found.append([(codec, n) for codec, n in bands if n] or [(WHOLE_BAND, 0)])
        return found

    @cached_property
    def _values(self) -> list[PageCodec]:
        group = value_group(len(self.key_bits[0]))
        return [WHOLE_BAND if bits == WHOLE else Packing(bits, group, packed=self.packed) for bits in self.value_bits]

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        return self._bands[head]

    def of_values(self, head: int) -> PageCodec:
        return self._values[head]

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        k = key_bytes([*self.counts.T], dtype.itemsize, packed=self.packed)
        v = value_bytes(np.array(self.value_bits), head_dim, dtype.itemsize, packed=self.packed)
        return np.broadcast_to(k, count.shape), np.broadcast_to(v, count.shape)

    def segment(self, extent: Extent) -> PageSegment:
        """An empty segment. Raises ValueError if other channels are kept than have bits."""
        if (extent.channels.count != self.counts[:, : len(BANDS)].sum(-1)).any():
            raise ValueError("a layout of bits says itself which channels are kept; leave out another choice of them")
        return super().segment(extent)


def check_flush(flush: int) -> None:
    """Raise ValueError unless whole groups of tokens leave the window."""
    if flush % GROUP:
        raise ValueError(
            f"flush={flush} must be a multiple of {GROUP}, tokens that a mask with bits per channel stores together; "
            f"set flush to {round_up(flush, GROUP)}"
        )


def codecs(precision: Precision) -> list[Banded]:
    """The codec of every layer."""
    layers = [
        Banded(tuple(map(tuple, of_keys)), tuple(of_values), (), precision.packed)
        for of_keys, of_values in zip(precision.key_bits.tolist(), precision.value_bits.tolist(), strict=True)
    ]
    heads = tuple(head for layer in layers for head in layer.heads if any(head[: len(BANDS)]))
    return [replace(layer, every_head=heads) for layer in layers]
