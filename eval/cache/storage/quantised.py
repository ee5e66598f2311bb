"""Middle K and V in 2, 4 or 8 bits (KIVI, section 3): the packed form of eval.cache.storage.segment.

A *cell* of numbers shares a scale and a zero point (eval.cache.storage.cells). KIVI keeps a residual of recent tokens
whole until they fill a group. Here the window is that residual: tokens are quantised once, when they leave it, `flush`
at a time.

A page of 64 tokens is a plane of codes, then one of *scales*: every cell's scale and zero point, in the model's dtype.

               codes, bytes                                     scales
    K, 8 bits  [64, C]                                          [64 / group, C / 2, 2, 2]
       4 bits  [32, C], a byte for tokens t and t + 32
       2 bits  [32, C / 2], also for channels c and c + C / 2
    V          [D bits / 8, 64], for channels D bits / 8 apart  [D / group, 32, 2, 2]

A byte holds codes of numbers that lie far apart, the first in the lowest bits. So the codes of a byte belong to
different products of the kernel, and one load of bytes is an operand of each. Neighbours in memory are numbers over
which a product sums, and a GPU computes with two of them at a time: so of two cells, both scales come first, then both
zero points. C is the number of kept channels, rounded up to 16, so that lines are whole words; the others are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.storage.cells import Cells
from leank.eval.cache.storage.folds import K_FOLDS, V_FOLDS, fold, unfold
from leank.eval.cache.storage.segment import COPIED, PAGE, Count, Extent, Segment, alike, round_up
from leank.eval.cache.storage.upload import update, upload

ROOM = 16  # a page has room for a multiple of so many channels of K


@dataclass(frozen=True)
class Packing(Cells):
    """How cells are packed into pages; the fields are those of `Cells`."""

    kernels: ClassVar[str | None] = "leank.eval.cache.attention.packed:kernels"

    def segment(self, extent: Extent) -> QuantisedSegment:
        """An empty packed segment; V keeps all its channels."""
        self.check(extent.head_dim)
        return QuantisedSegment(extent, self)

    @property
    def why_not_kernel(self) -> str | None:
        """Why only plain PyTorch can read it, or None."""
        return None if self.group >= 32 else f"the kernel reads groups of 32 or 64 numbers, not {self.group}"

    def room(self, channels: Count) -> Count:
        """Channels of K for which a page has room when so many are kept."""
        return round_up(channels, ROOM)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, Count], tuple[int, int]]:
        """For K and for V: bytes of a page's codes, and of its scales."""
        scales = PAGE // self.group * 2 * dtype.itemsize
        of_codes = PAGE * self.bits // 8
        room = self.room(channels)
        return (room * of_codes, room * scales), (head_dim * of_codes, head_dim * scales)


class QuantisedSegment(Segment):
    """A Segment whose k and v are packed pages, uint8; appended tokens begin at a whole group in every head."""

    def __init__(self, extent: Extent, packing: Packing) -> None:
        assert extent.values is None
        self.packing = packing
        super().__init__(extent)

    def _of_form(self, extent: Extent) -> QuantisedSegment:
        return QuantisedSegment(extent, self.packing)

    def _form(self) -> torch.dtype:
        return torch.uint8

    def _sizes(self) -> tuple[tuple[np.ndarray, int], ...]:
        pages = self.packing.pages(self.head_dim, self.channels.count, self.dtype)
        sizes = [self.capacity // PAGE * (codes + scales) for codes, scales in pages]
        return tuple((size, max(1, int(np.gcd.reduce(size, axis=None)))) for size in sizes)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens; the parameters are those of `Segment.append`.

        A prompt's last group may be short of tokens; later tokens must then go to another segment.

        Raises ValueError if a head that takes tokens does not hold whole groups.
        """
        taken, group = np.where(self.capacity[rows] > 0, k.shape[2] if count is None else count, 0), self.packing.group
        if (self.length[rows] % group)[taken > 0].any():
            raise ValueError(f"tokens must follow whole groups of {group}; set flush to a multiple of it")
        for piece in alike(self, self.length, rows, taken) if taken.any() else ():
            row, number = int(rows[piece.start]), piece.stop - piece.start
            step = max(PAGE, COPIED // (number * self.head_dim) // PAGE * PAGE)
            for head in np.flatnonzero(taken[piece.start]).tolist():
                held, channels = (int(a[row, head]) for a in (self.length, self.channels.count))
                n = int(taken[piece.start, head])
                kept = self.channels.index[row : row + number, head, None, :channels].long()
                for first in range(0, n, step):
                    last = min(first + step, n)
                    keys, values = (x[piece, head, first:last] for x in (k, v))
                    self._put(row, head, held + first, keys.gather(2, kept.expand(-1, last - first, -1)), values)
        self.length[rows] += taken
        update(self.length_dev, self.length)

    def _put(self, row: int, head: int, at: int, keys: Tensor, values: Tensor) -> None:
        """Write keys [number, n, channels] and values [number, n, D] of one head of like rows, from token `at` on."""
        (number, n, channels), group = keys.shape, self.packing.group
        place = row, number, head, slice(at // PAGE, -(-(at + n) // PAGE))
        first, whole = at % PAGE, round_up(n, group)
        k, k_scales, v, v_scales = self._opened(*place)
        # A short group repeats its last token, and so the kernel reads numbers where it reads pairs of tokens.
        keys, values = (torch.cat([x, x[:, -1:].expand(-1, whole - n, -1)], 1) for x in (keys, values))
        codes, scales = self.packing.quantise(pad(keys, (0, self.packing.room(channels) - channels)))
        k[:, first : first + whole] = codes
        k_scales[:, first // group : (first + whole) // group] = scales
        codes, scales = self.packing.quantise(values.mT)
        v[..., first : first + whole] = codes
        v_scales[:, :, first : first + whole] = scales
        self._close(*place, (k, k_scales, v, v_scales))

    def _opened(self, row: int, number: int, head: int, pages: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What some pages of one head hold in `number` rows of the same layout, copies, tokens of all pages in a row.

        Returns codes [number, tokens, room] and scales [number, cells, room, 2] of K, then codes [number, D, tokens]
        and scales [number, cells, tokens, 2] of V.
        """
        (k, k_scales), (v, v_scales) = self._planes(row, number, head)
        codes = unfold(v[:, pages], V_FOLDS[self.packing.bits]).transpose(1, 2).flatten(2, 3)
        return (
            unfold(k[:, pages], K_FOLDS[self.packing.bits]).flatten(1, 2).clone(),
            k_scales[:, pages].flatten(1, 2).flatten(2, 3).clone(),
            codes.clone(),
            v_scales[:, pages].transpose(1, 2).flatten(2, 4).clone(),
        )

    def _close(self, row: int, number: int, head: int, pages: slice, opened: tuple[Tensor, ...]) -> None:
        """Write what `_opened` gave back into the pages."""
        (k, k_scales), (v, v_scales) = self._planes(row, number, head)
        codes, scales, v_codes, v_new = opened
        k[:, pages] = fold(codes.unflatten(1, (-1, PAGE)), K_FOLDS[self.packing.bits])
        k_scales[:, pages] = scales.view_as(k_scales[:, pages])
        v[:, pages] = fold(v_codes.unflatten(2, (-1, PAGE)).transpose(1, 2), V_FOLDS[self.packing.bits])
        v_scales[:, pages] = v_new.unflatten(2, (-1, PAGE // 2, 2)).transpose(1, 2)

    def without_spare(self) -> tuple[Tensor, Tensor]:
        """K and v, copies, with zeros where room is left."""
        new = self._of_form(Extent(self.channels, self.capacity, self.head_dim, self.dtype))
        new.k, new.v = self.k.clone(), self.v.clone()
        for row, head in np.argwhere(self.capacity > 0).tolist():
            place, held = (row, 1, head, slice(None)), int(self.length[row, head])
            cells = -(-held // self.packing.group)
            k, k_scales, v, v_scales = new._opened(*place)
            k[:, cells * self.packing.group :], k_scales[:, cells:], v[..., held:], v_scales[:, :, held:] = 0, 0, 0, 0
            new._close(*place, (k, k_scales, v, v_scales))
        return new.k, new.v

    def _planes(self, row: int, number: int, head: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Codes and scales of K and V of one head in `number` rows of the same layout: [number, pages, ...], views."""
        pages, channels = int(self.capacity[row, head]) // PAGE, int(self.channels.count[row, head])
        found = []
        for flat, start, (codes, scales) in zip(
            (self.k, self.v),
            (self.k_start, self.v_start),
            self.packing.pages(self.head_dim, channels, self.dtype),
            strict=True,
        ):
            ahead = int(start[row + 1, head] - start[row, head]) if number > 1 else 0
            region = flat.as_strided((number, pages, codes + scales), (ahead, codes + scales, 1), int(start[row, head]))
            found.append((region[..., :codes], region[..., codes:].view(self.dtype)))
        return self._shaped(*found[0], channels), self._shaped(*found[1], None)

    def _shaped(self, codes: Tensor, scales: Tensor, channels: int | None) -> tuple[Tensor, Tensor]:
        """Codes of pages with their axes, and scales [..., cells, N / 2, 2, 2], views; the last axis is (scale, zero).

        channels: kept channels of K, None = planes of V
        """
        bits, group = self.packing.bits, self.packing.group
        if channels is None:
            lines, line, cells, numbers = self.head_dim * bits // 8, PAGE, self.head_dim // group, PAGE
        else:
            cells, numbers = PAGE // group, self.packing.room(channels)
            lines, line = PAGE // (1 if bits == 8 else 2), numbers // (2 if bits == 2 else 1)
        return codes.unflatten(-1, (lines, line)), scales.unflatten(-1, (cells, numbers // 2, 2, 2)).mT

    def _keys(self, codes: Tensor, scales: Tensor, channels: int) -> Tensor:
        """Keys [..., 64, channels] of the planes of pages."""
        return self.packing.restore(unfold(codes, K_FOLDS[self.packing.bits]), scales.flatten(-3, -2))[..., :channels]

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Values [..., D, 64] of the planes of pages."""
        return self.packing.restore(unfold(codes, V_FOLDS[self.packing.bits]), scales.flatten(-3, -2))

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's room dequantised, a copy: K [pages, channels, 64], V [capacity, D]."""
        k, v = self._planes(row, 1, head)
        return self._keys(*k, int(self.channels.count[row, head]))[0].mT, self._values(*v)[0].mT.flatten(0, 1)

    def padded_keys(self, hidden: Tensor) -> Tensor:
        """The keys of all heads, zero where there is none: [B H, channels, N].

        hidden: [B H, N] bool, columns without a token
        """
        count = self.channels.count.reshape(-1)
        out = torch.zeros(*hidden.shape[:1], int(count.max()), hidden.shape[1], dtype=self.dtype, device=hidden.device)
        for channels in np.unique(count[self.length.reshape(-1) > 0]).tolist():
            planes, _ = self.packing.pages(self.head_dim, channels, self.dtype)
            heads, codes, scales = self._of_heads(self.k, self.k_start, planes, count == channels, hidden.shape[1])
            keys = self._keys(*self._shaped(codes, scales, channels), channels).flatten(1, 2).mT
            out[heads, :channels] = torch.where(hidden[heads, None], 0, keys)
        return out

    def padded_values(self, hidden: Tensor) -> Tensor:
        """The values of all heads, zero where there is none, [B H, N, D]; hidden [B H, N], columns without a token."""
        out = torch.zeros(*hidden.shape, self.head_dim, dtype=self.dtype, device=hidden.device)
        _, planes = self.packing.pages(self.head_dim, 0, self.dtype)
        every = np.ones(len(hidden), dtype=bool)
        heads, codes, scales = self._of_heads(self.v, self.v_start, planes, every, hidden.shape[1])
        values = self._values(*self._shaped(codes, scales, None)).mT.flatten(1, 2)
        out[heads] = torch.where(hidden[heads, :, None], 0, values)
        return out

    def _of_heads(
        self, flat: Tensor, start: np.ndarray, planes: tuple[int, int], some: np.ndarray, columns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [n] among `some` [B H] that hold tokens, and copies of their pages' codes and scales [n, pages, ...].

        planes: bytes of a page's codes, and of its scales
        columns: tokens; where a head has no page, its last one stands
        """
        codes, scales = planes
        length, (found,) = self.length.reshape(-1), np.nonzero(some & (self.length.reshape(-1) > 0))
        page = np.minimum(np.arange(columns // PAGE), (length[found, None] - 1) // PAGE)
        starts = upload(start.reshape(-1)[found, None] + page * (codes + scales), flat.device)
        every = flat.as_strided((max(0, len(flat) - codes - scales + 1), codes + scales), (1, 1))
        pages = every.index_select(0, starts.flatten()).view(*starts.shape, -1)
        return upload(found, flat.device), pages[..., :codes], pages[..., codes:].contiguous().view(self.dtype)

    def held(self) -> tuple[int, int]:
        """Bytes of K and of V of the tokens held; a short group counts as a whole one."""
        packing = self.packing
        (k_codes, k_scales), v = packing.pages(self.head_dim, self.channels.count, self.dtype)
        tokens = round_up(self.length, packing.group)
        return int((tokens * (k_codes + k_scales)).sum()) // PAGE, int(self.length.sum()) * sum(v) // PAGE
