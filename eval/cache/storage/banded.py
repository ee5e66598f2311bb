"""A middle in the bits that a mask's layout gives each channel (`leank.precision`): a codec of pages.

A page of K is one band after the other, the widest first, and each band is a page of KIVI's codec (`quantised`) for as
many channels as have that width; a band of 16 bits holds its numbers channel by channel, [C, 64], as an unpacked middle
does. A page of V is KIVI's page of the head's width, or [D, 64] of plain numbers.

A kernel is compiled for a few *forms*: the room of every band, in steps that a GPU multiplies, and the bits of V. A
head is read by the first form that has room for its bands.

    K of a head with 20 channels at 16 bits, 32 at 4 and 16 at 2, in bfloat16:
    | 64 x 32 numbers | codes of 32 | scales of 32 | codes of 16 | scales of 16 |
      4096 bytes        1024          128            256           64
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.codecs import BandCodec, PageCodec, PageSegment
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE, Count, Extent, round_up
from leank.precision import GROUP, KEY_BITS, ROOM, WHOLE, Precision, value_group


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
        lines = pad(numbers, (0, -numbers.shape[-1] % ROOM)) if keys else numbers.mT
        return codes.flatten(-2), lines.flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        if keys:
            found = numbers.unflatten(-1, (PAGE, round_up(dim, ROOM)))[..., :dim]
        else:
            found = numbers.unflatten(-1, (dim, PAGE)).mT
        return codes[..., None, :].expand(*codes.shape[:-1], PAGE, 0), found


WHOLE_BAND = Whole()


BANDS = tuple(reversed(KEY_BITS[1:]))  # bits, the widest first
LEAST_LINES = 32  # lines of codes that a product takes, a byte each; codes of 2 bits are two channels to a line
MOST_FORMS = 4  # of heads, where V has not more widths: each takes some ten seconds to compile
PAGE_ROOM = 26_000  # bytes: with four such pages on its way, a program leaves a GPU's multiprocessor room for another
Form = tuple[int, ...]  # room for channels of each band, in the order of BANDS, then the bits of V


@dataclass(frozen=True)
class Banded(BandCodec):
    """The codec of one layer of a layout."""

    kernels: ClassVar[str | None] = "leank.eval.cache.attention.launch:banded_kernels"
    key_bits: tuple[tuple[int, ...], ...]  # of every channel of K, [H][D]
    value_bits: tuple[int, ...]  # of V, [H]
    forms: tuple[Form, ...]  # for which a kernel is compiled, those of all layers
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
        """Channels of every band, [H, bands]."""
        return counts(np.array(self.key_bits))

    @cached_property
    def form_of_heads(self) -> np.ndarray:
        """The number of the form that reads each head, [H]."""
        return np.array(
            [
                next((i for i, form in enumerate(self.forms) if _reads(form, one)), 0)  # an empty head is not read
                for one in _needed(self.counts, self.value_bits)
            ]
        )

    @cached_property
    def _bands(self) -> list[list[tuple[PageCodec, int]]]:
        codecs = [_packing(width, GROUP) for width in BANDS]
        found = [[(c, n) for c, n in zip(codecs, of_head, strict=True) if n] for of_head in self.counts.tolist()]
        return [of_head or [(WHOLE_BAND, 0)] for of_head in found]

    @cached_property
    def _values(self) -> list[PageCodec]:
        return [_packing(bits, value_group(len(self.key_bits[0]))) for bits in self.value_bits]

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        return self._bands[head]

    def of_values(self, head: int) -> PageCodec:
        return self._values[head]

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
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
        """Why only plain PyTorch can read it: not at all, where the kernel takes the model's heads."""
        return None


def check_flush(flush: int) -> None:
    """Raise ValueError unless whole groups of tokens leave the window."""
    if flush % GROUP:
        raise ValueError(
            f"flush={flush} must be a multiple of {GROUP}, tokens that a mask with bits per channel stores together; "
            f"set flush to {round_up(flush, GROUP)}"
        )


def _packing(bits: int, group: int) -> PageCodec:
    return WHOLE_BAND if bits == WHOLE else Packing(bits, group)


def counts(key_bits: np.ndarray) -> np.ndarray:
    """Channels of every band [..., bands] of key_bits [..., D]."""
    return np.stack([(key_bits == width).sum(-1) for width in BANDS], -1)


def codecs(precision: Precision) -> list[Banded]:
    """The codec of every layer."""
    keys, values = precision.key_bits.tolist(), precision.value_bits.tolist()
    found = forms(precision)
    return [
        Banded(tuple(map(tuple, of_keys)), tuple(of_values), found)
        for of_keys, of_values in zip(keys, values, strict=True)
    ]


def forms(precision: Precision) -> tuple[Form, ...]:
    """Forms that have room for every head, at most MOST_FORMS where V has no more widths.

    Beginning with what each head needs, two with the same V are made one, those first that waste the least room. That
    ends at MOST_FORMS where every pair would exceed PAGE_ROOM: the largest form decides what memory a program takes.
    """
    bits, keep = precision.key_bits.flatten(0, 1).numpy(), precision.keep.flatten(0, 1).any(-1).numpy()
    heads = Counter(_needed(counts(bits[keep]), precision.value_bits.flatten().numpy()[keep].tolist()))

    def room(form: Form) -> int:
        return page_room(form, bits.shape[-1], 2)

    def cost(pair: tuple[Form, Form]) -> tuple[bool, int]:
        joint = room(_joint(pair))
        return joint > PAGE_ROOM, sum(heads[one] * (joint - room(one)) for one in pair)

    while pairs := [(a, b) for a, b in combinations(sorted(heads), 2) if a[-1] == b[-1]]:
        pair = min(pairs, key=cost)
        if room(_joint(pair)) > PAGE_ROOM and len(heads) <= MOST_FORMS:
            break
        number = sum(heads.pop(one) for one in pair)
        heads[_joint(pair)] += number
    return tuple(sorted(heads, key=sum))


def page_room(form: Form, head_dim: int, itemsize: int) -> int:
    """Bytes of a page of K and V for which a form has room."""
    of_bits = [(bits, PAGE * itemsize if bits == WHOLE else PAGE * bits // 8 + 2 * itemsize) for bits in BANDS]
    return sum(n * size for n, (_, size) in zip(form, of_bits, strict=False)) + head_dim * dict(of_bits)[form[-1]]


def _joint(pair: tuple[Form, Form]) -> Form:
    return tuple(map(max, *pair))


def _needed(of_bands: np.ndarray, value_bits: Sequence[int]) -> list[Form]:
    """What each head needs at least, of channels of its bands [N, bands]."""
    steps = np.array([ROOM, LEAST_LINES, LEAST_LINES, 4 * LEAST_LINES, 2 * LEAST_LINES])
    room = -(-of_bands // steps) * steps
    return [(*one, bits) for one, bits in zip(room.tolist(), value_bits, strict=True)]


def _reads(form: Form, needed: Form) -> bool:
    return form[-1] == needed[-1] and all(room >= own for room, own in zip(form, needed, strict=True))
