"""How the middle's numbers are stored in another form than the model's: a codec, and the segments that it fills.

A quantiser is one class. `PageCodec` has the storage: a subclass says with how many `bits`, and how vectors are encoded
and decoded; `quantised` (KIVI) also lays its pages out for a kernel. `banded` makes pages of several quantisers.
`RecordCodec` makes short records of keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.segment import PAGE, Count, Extent, Segment, kept_of, numbers_held, round_up
from leank.eval.cache.storage.upload import upload

Folds = tuple[tuple[int, int], ...]  # (axis, shift): of this axis, the second half lies `shift` bits above the first

LOWER = {4: 0x0F, 2: 0x33, 1: 0x55}  # the bits of a byte that hold codes where others lie so many bits higher
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # by bits of a code, those of its parts, the lowest first
VECTOR_FOLDS: dict[int, Folds] = {  # by bits of a part, of whole vectors [64, d]
    8: (),
    4: ((-1, 4),),
    2: ((-1, 4), (-1, 2)),
    1: ((-1, 4), (-1, 2), (-1, 1)),
}


def fold(codes: Tensor, folds: Folds) -> Tensor:
    """Bytes of codes."""
    for axis, shift in folds:
        first, second = codes.chunk(2, axis)
        codes = first | second << shift
    return codes


def unfold(stored: Tensor, folds: Folds) -> Tensor:
    """The codes of which `fold` made bytes."""
    for axis, shift in reversed(folds):
        stored = torch.cat([stored & LOWER[shift], (stored >> shift) & LOWER[shift]], axis)
    return stored


def vector_bytes(dim: Count, bits: int) -> Count:
    """Bytes of a vector's codes: each part of a code, as in PLANES, fills whole bytes."""
    return sum((-(-dim // (8 // part)) for part in PLANES[bits]), start=dim * 0)


class Codec(ABC):
    """How the middle's numbers are stored.

    holds: what that is, in words
    """

    holds: ClassVar[str] = "numbers in a form of their own"

    @property
    def order(self) -> Tensor | None:
        """Numbers of channels of K, uint8 [H, D]: those of a larger one are stored before the others; None = any."""
        return None

    @abstractmethod
    def segment(self, extent: Extent) -> Segment:
        """An empty segment of this form."""

    @abstractmethod
    def held(self, tokens: np.ndarray, channels: np.ndarray, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of K and of V of so many tokens, in heads that keep so many channels of K, both [B, H].

        What a segment counts, what a method's formula counts before it runs, and what a planner counts on are this.
        """


# Codes of K and V in pages


class BandCodec(Codec):
    """K and V in pages of 64 tokens, in which each head stores K in bands: channels that a codec of its own encodes."""

    group: int = 1  # tokens that are encoded together, a divisor of 64

    @abstractmethod
    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        """How a head stores the `channels` of K that it keeps: the codec and the number of channels of each band."""

    @abstractmethod
    def of_values(self, head: int) -> PageCodec:
        """How a head stores V."""

    @abstractmethod
    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of a page of K and of V of heads that keep `count` [B, H] channels, each [B, H]."""

    def segment(self, extent: Extent) -> PageSegment:
        return PageSegment(extent, self)

    def held(self, tokens: np.ndarray, channels: np.ndarray, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        """See `Codec.held`; a short group of K counts as a whole one."""
        k, v = self.page_bytes(head_dim, channels, dtype)
        return int((round_up(tokens, self.group) * k).sum()) // PAGE, int((tokens * v).sum()) // PAGE


class PageCodec(BandCodec):
    """Kept channels of K, and V, as codes of few bits and some numbers beside them: one band in every head.

    A page is a plane of codes, in bytes, then a plane of numbers in the model's dtype. Here every vector of a token has
    codes in whole bytes and one number. A subclass whose pages lie otherwise says so in `pages`, `pack` and `unpack`.

    bits: of a code, one of PLANES
    numbers_dtype: of the numbers; None = the model's
    """

    bits: int
    numbers_dtype: torch.dtype | None = None

    @abstractmethod
    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes uint8, one for each number of x [R, n, d], whole groups, and numbers [R, n or n / group, ...].

        keys: whether these are the kept channels of K, else V
        """

    @abstractmethod
    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors [..., n, d] of codes and numbers from `encode`."""

    def saturated(self, x: Tensor) -> Tensor | None:
        """How many numbers of x [R, n, d] exceed the largest that it stores, int64 [R]; None = it has none."""
        return None

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Any], tuple[int, int]]:
        """For K, of which so many channels are kept, and for V: bytes of a page's codes, and of its numbers."""
        numbers = PAGE * dtype.itemsize
        return (vector_bytes(channels, self.bits) * PAGE, numbers), (vector_bytes(head_dim, self.bits) * PAGE, numbers)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Planes [..., bytes] and [..., numbers] of whole pages, of their codes [..., 64, d] and numbers."""
        planes, lower = [], 0
        for bits in PLANES[self.bits]:
            part = pad(codes >> lower & 2**bits - 1, (0, -codes.shape[-1] % (8 // bits)))
            planes.append(fold(part, VECTOR_FOLDS[bits]))
            lower += bits
        return torch.cat(planes, -1).flatten(-2), numbers

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, d] and numbers of the planes that `pack` made."""
        parts, found, lower = PLANES[self.bits], torch.zeros((), dtype=torch.uint8, device=codes.device), 0
        planes = codes.unflatten(-1, (PAGE, -1)).split([-(-dim // (8 // bits)) for bits in parts], -1)
        for bits, plane in zip(parts, planes, strict=True):
            found = found | unfold(plane, VECTOR_FOLDS[bits])[..., :dim] << lower
            lower += bits
        return found, numbers

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        return [(self, channels)]

    def of_values(self, head: int) -> PageCodec:
        return self

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.pages(head_dim, count, dtype)
        return np.asarray(sum(k)), np.full_like(count, sum(v))


@dataclass(frozen=True)
class OfHeads(BandCodec):
    """One band in every head, of the codecs of K and of V of each head, or one pair for all; all of the same groups."""

    heads: tuple[tuple[PageCodec, PageCodec], ...]

    @property
    def group(self) -> int:  # type: ignore[override]
        return self.heads[0][0].group

    def _of(self, head: int) -> tuple[PageCodec, PageCodec]:
        return self.heads[head % len(self.heads)]

    @property
    def holds(self) -> str:  # type: ignore[override]
        return self.heads[0][0].holds

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        return [(self._of(head)[0], channels)]

    def of_values(self, head: int) -> PageCodec:
        return self._of(head)[1]

    def page_bytes(self, head_dim: int, count: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        k, v = np.empty_like(count), np.empty_like(count)
        for head in range(count.shape[1]):
            of_keys, of_values = self._of(head)
            k[:, head] = of_keys.page_bytes(head_dim, count[:, head], dtype)[0]
            v[:, head] = of_values.page_bytes(head_dim, count[:, head], dtype)[1]
        return k, v


class Plane(NamedTuple):
    """What one codec stores of a head.

    keys: whether it is of K, else of V
    channels: which of the kept channels
    codes, numbers: views of the pages, [rows, pages, ...]
    dtype: the model's
    """

    codec: PageCodec
    keys: bool
    channels: slice
    codes: Tensor
    numbers: Tensor
    dtype: torch.dtype

    def decoded(self) -> Tensor:
        """The vectors [rows, pages, 64, channels]."""
        found = self.codec.unpack(self.codes, self.numbers, self.channels.stop - self.channels.start, self.keys)
        return self.codec.decode(*found, self.keys).to(self.dtype)


class PageSegment(Segment):
    """A Segment whose k and v are packed pages, uint8; appended tokens begin at a whole group in every head.

    saturated: int64 [B] on the device, numbers beyond the largest that is stored (`PageCodec.saturated`) among those
        appended to this very segment; None = none was appended to a codec with a largest number
    """

    def __init__(self, extent: Extent, codec: BandCodec) -> None:
        assert extent.values is None
        self.codec = codec
        self.saturated: Tensor | None = None
        super().__init__(extent)

    def _of_form(self, extent: Extent) -> PageSegment:
        return PageSegment(extent, self.codec)

    def _form(self) -> torch.dtype:
        return torch.uint8

    def page_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of a page of K and of V, each [B, H]."""
        return self.codec.page_bytes(self.head_dim, self.channels.count, self.dtype)

    def _sizes(self) -> tuple[tuple[np.ndarray, int], ...]:
        sizes = [self.capacity // PAGE * page for page in self.page_bytes()]
        return tuple((size, max(1, int(np.gcd.reduce(size, axis=None)))) for size in sizes)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens; see `Segment.append`. Raises ValueError behind a group that is short."""
        taken = np.where(self.capacity[rows] > 0, k.shape[2] if count is None else count, 0)
        if (self.length[rows] % self.codec.group)[taken > 0].any():
            raise ValueError(f"tokens must follow whole groups of {self.codec.group}; set flush to a multiple of it")
        super().append(rows, k, v, count)

    def _write_at_once(self, rows: np.ndarray, k: Tensor, v: Tensor, taken: np.ndarray) -> None:
        self._write_pieces(self._alike(rows, taken), rows, k, v, taken)

    def _write(self, row: int, number: int, head: int, at: int, k: Tensor, v: Tensor) -> None:
        n, short = k.shape[1], -k.shape[1] % self.codec.group
        first, last = at // PAGE, -(-(at + n) // PAGE)
        k = kept_of(k, self.channels, row, head)
        for codec, keys, channels, codes, numbers, _ in self._planes(row, number, head):
            x = (k if keys else v)[..., channels]
            self._count_saturated(row, codec.saturated(x))
            # A short group repeats its last token, and so the kernel reads numbers where it reads pairs of tokens.
            whole = torch.cat([x, x[:, -1:].expand(-1, short, -1)], 1)
            held = codec.unpack(codes[:, first:last], numbers[:, first:last], x.shape[-1], keys)
            opened = [y.flatten(1, 2).clone() for y in held]  # with the tokens of all pages in a row
            for old, coded in zip(opened, codec.encode(whole, keys), strict=True):
                tokens = (last - first) * PAGE // old.shape[1]  # that an entry of this tensor stands for
                begin = at % PAGE // tokens
                old[:, begin : begin + coded.shape[1]] = coded
            of_codes, of_numbers = (y.unflatten(1, (last - first, -1)) for y in opened)
            codes[:, first:last], numbers[:, first:last] = codec.pack(of_codes, of_numbers, keys)

    def _count_saturated(self, row: int, found: Tensor | None) -> None:
        """Add to the counts of as many rows from `row` on."""
        if found is not None:
            if self.saturated is None:
                self.saturated = torch.zeros(len(self.length), dtype=torch.int64, device=found.device)
            self.saturated[row : row + len(found)] += found

    def _planes(self, row: int, number: int, head: int) -> list[Plane]:
        """What one head holds in `number` rows of the same layout: the bands of K in their order, then V."""
        pages, found = int(self.capacity[row, head]) // PAGE, []
        for flat, start, keys, size in zip(
            (self.k, self.v), (self.k_start, self.v_start), (True, False), self.page_bytes(), strict=True
        ):
            ahead = int(start[row + 1, head] - start[row, head]) if number > 1 else 0
            page = int(size[row, head])
            region = flat.as_strided((number, pages, page), (ahead, page, 1), int(start[row, head]))
            found += self._in_pages(region, head, int(self.channels.count[row, head]), keys)
        return found

    def _in_pages(self, pages: Tensor, head: int, count: int, keys: bool) -> list[Plane]:
        """What the codecs of a head that keeps `count` channels store in pages [rows, pages, bytes] of K or V."""
        found, at, channel = [], 0, 0
        bands = self.codec.bands(head, count) if keys else [(self.codec.of_values(head), self.head_dim)]
        for codec, channels in bands:
            codes, numbers = codec.pages(self.head_dim, channels, self.dtype)[0 if keys else 1]
            of_numbers = pages[..., at + codes : at + codes + numbers].view(codec.numbers_dtype or self.dtype)
            part = slice(channel, channel + channels)
            found.append(Plane(codec, keys, part, pages[..., at : at + codes], of_numbers, self.dtype))
            at, channel = at + codes + numbers, channel + channels
        return found

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's room decoded, a copy: K [pages, channels, 64], V [capacity, D]."""
        *k, v = (plane.decoded()[0] for plane in self._planes(row, 1, head))
        return torch.cat(k, -1).mT, v.flatten(0, 1)

    def padded_keys(self, hidden: Tensor) -> Tensor:
        """The keys of all heads, [B H, channels, N], zero in columns without a token, hidden [B H, N]."""
        most = int(self.channels.count.max())
        out = torch.zeros(len(hidden), most, hidden.shape[1], dtype=self.dtype, device=hidden.device)
        for heads, planes in self._of_heads(hidden.shape[1], True):
            for plane in planes:
                keys = plane.decoded().flatten(1, 2).mT
                out[heads, plane.channels] = torch.where(hidden[heads, None], 0, keys)
        return out

    def padded_values(self, hidden: Tensor) -> Tensor:
        """The values of all heads, zero where there is none, [B H, N, D]; hidden [B H, N], columns without a token."""
        out = torch.zeros(*hidden.shape, self.head_dim, dtype=self.dtype, device=hidden.device)
        for heads, (plane,) in self._of_heads(hidden.shape[1], False):
            out[heads] = torch.where(hidden[heads, :, None], 0, plane.decoded().flatten(1, 2))
        return out

    def _of_heads(self, columns: int, keys: bool) -> Iterator[tuple[Tensor, list[Plane]]]:
        """Heads [n] of one kind that hold tokens, and copies of their pages; a last one may repeat."""
        flat, start = (self.k, self.k_start) if keys else (self.v, self.v_start)
        length, count = (a.reshape(-1) for a in (self.length, self.channels.count))
        size, heads = self.page_bytes()[0 if keys else 1].reshape(-1), self.length.shape[1]
        kinds: dict[object, list[int]] = {}
        for head in np.flatnonzero(length > 0).tolist():
            kind = (
                tuple(self.codec.bands(head % heads, int(count[head]))) if keys else self.codec.of_values(head % heads)
            )
            kinds.setdefault(kind, []).append(head)
        for found in map(np.array, kinds.values()):
            first, own = int(found[0]), int(size[found[0]])
            page = np.minimum(np.arange(columns // PAGE), (length[found, None] - 1) // PAGE)
            starts = upload(start.reshape(-1)[found, None] + page * own, flat.device)
            every = flat.as_strided((max(0, len(flat) - own + 1), own), (1, 1))
            pages = every.index_select(0, starts.flatten()).view(*starts.shape, -1)
            yield upload(found, flat.device), self._in_pages(pages, first % heads, int(count[first]), keys)

    def held(self) -> tuple[int, int]:
        return self.codec.held(self.length, self.channels.count, self.head_dim, self.dtype)


# Keys as records


class RecordCodec(Codec):
    """Keys as short records, one per token and KV head, where kept channels would lie; the values stay as they are."""

    holds = "keys as records"

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in a record, fewer than head_dim."""

    def held(self, tokens: np.ndarray, channels: np.ndarray, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        return numbers_held(tokens, self.width, head_dim, dtype)

    @abstractmethod
    def encode(self, keys: Tensor, rows: np.ndarray) -> Tensor:
        """Records [R, H, n, width] of keys [R, H, n, D] of some rows [R] of the batch."""

    @abstractmethod
    def decode(self, records: Tensor, rows: np.ndarray) -> Tensor:
        """Keys [R, H, n, D] of records [R, H, n, width]."""

    def select(self, rows: Tensor) -> Self:
        """The codec of the batch `rows` [R] of the present one."""
        return self

    def to(self, device: torch.device) -> Self:
        """The codec on a device."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """What it holds for these prompts, by name; weights that serve every prompt are not among it."""
        return {}

    def segment(self, extent: Extent) -> RecordSegment:
        """An empty segment of records. Raises ValueError unless K keeps all its channels."""
        if (extent.channels.count < extent.head_dim).any() or extent.values is not None:
            raise ValueError("keys that are stored as records keep all channels; leave out the choice of channels")
        return RecordSegment(extent, self.to(extent.channels.index.device))


class RecordSegment(Segment):
    """A Segment whose keys are records; its `channels` are the numbers of a record."""

    def __init__(self, extent: Extent, codec: RecordCodec) -> None:
        """Make room; extent: of whole keys, or of their records."""
        self.codec = codec
        super().__init__(replace(extent, channels=first_channels(extent.channels, codec.width)))

    def _of_form(self, extent: Extent) -> RecordSegment:
        return RecordSegment(extent, self.codec)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        records = self.codec.encode(k, rows).to(self.dtype)
        padded = pad(records, (0, self.head_dim - records.shape[-1]))
        super().append(rows, padded, v, count)

    def keys_of(self, records: Tensor) -> Tensor:
        batch = self.length.shape[0]
        found = self.codec.decode(records.mT.unflatten(0, (batch, -1)), np.arange(batch))
        return found.flatten(0, 1).mT

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        records, values = super().read(row, head)
        of_all = records.new_zeros(1, self.length.shape[1], *records.shape)
        of_all[0, head] = records
        return self.codec.decode(of_all, np.array([row]))[0, head], values

    def select(self, rows: Tensor, channels: KeptChannels, values: KeptChannels | None) -> Segment:
        new = super().select(rows, channels, values)
        assert isinstance(new, RecordSegment)
        new.codec = self.codec.select(rows)
        return new

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self.codec.tensors()}


def first_channels(channels: KeptChannels, count: int) -> KeptChannels:
    """A table of the first `count` channels, for as many rows and heads."""
    place = torch.arange(channels.index.shape[-1], device=channels.index.device, dtype=torch.int32)
    index = torch.where(place < count, place, 0).expand_as(channels.index)
    return KeptChannels(np.full_like(channels.count, count), index)
