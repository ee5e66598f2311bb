"""Where middle tokens lie: each row and KV head has room for its own number of tokens and of K channels.

All K lie in one flat tensor and all V in another. Each head has a region in both, and the regions lie back to back, row
by row, then head by head. Here head 0 keeps 2 channels and has room for 128 tokens, head 1 keeps none and has no region
in either tensor, and head 2 keeps 3 channels and has room for 64 tokens:

    k    | row 0, head 0                                      | row 0, head 2              | row 1, head 0 ...
         | page 0                  | page 1                   | page 0                     |
         | c0 x 64    | c1 x 64    | c0 x 64     | c1 x 64    | c0 x 64 | c1 x 64 | c2 x 64 |
         ^ k_start[0, 0]                                      ^ k_start[0, 2]

    v    | row 0, head 0                                      | row 0, head 2              | row 1, head 0 ...
         | token 0, D numbers | token 1 | ...  | token 127    | token 0 | ... | token 63   |
         ^ v_start[0, 0]                                      ^ v_start[0, 2]

A region of K is channel-major in pages of 64 tokens, [page, channel, 64], so that reads are aligned and contiguous for
any number of channels. A region of V is token-major, [token, D]; where V is pruned, it is stored as K is. Where steps
read single tokens, K is token-major too (`TokenSegment`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.upload import upload

PAGE = 64  # tokens

Count = TypeVar("Count", int, np.ndarray)


def round_up(n: Count, multiple: int) -> Count:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def _exclusive(sizes: np.ndarray) -> np.ndarray:
    """Offset of each region when regions of `sizes` [B, H] are stored back to back (exclusive prefix sum)."""
    flat = sizes.reshape(-1)
    return (np.cumsum(flat) - flat).reshape(sizes.shape)


def spread(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Tensor:
    """The ranges start, start + 1, ..., start + size - 1 of all regions, concatenated: int64 on `device`."""
    start, size = (upload(a.reshape(-1), device) for a in (starts, sizes))
    total = int(sizes.sum())
    first = torch.cumsum(size, 0) - size
    return torch.repeat_interleave(start - first, size, output_size=total) + torch.arange(total, device=device)


def lines(flat: Tensor, width: int) -> Tensor:
    """A flat tensor, possibly empty, as lines of `width` elements."""
    return flat.view(flat.numel() // width, width)


def words(flat: Tensor, width: int) -> Tensor:
    """The same lines in words of eight bytes, if these fill them: a GPU copies a word in the time of a byte."""
    fill = width * flat.element_size() % 8 == 0
    return lines(flat.view(torch.int64), width * flat.element_size() // 8) if fill else lines(flat, width)


@dataclass(frozen=True, eq=False)
class Extent:
    """What a segment has to hold, whatever its form.

    channels: kept channels of K
    capacity: [B, H] on the host, tokens that each row and head must have room for
    head_dim: D
    dtype: the model's, of keys and values as they come
    values: kept channels of V, None = all
    """

    channels: KeptChannels
    capacity: np.ndarray
    head_dim: int
    dtype: torch.dtype
    values: KeptChannels | None = None


class Regions:
    """Room for middle tokens of all rows and heads; which of it is filled, `Segment` knows.

    Attributes:
    channels, values, head_dim, dtype: see `Extent`
    capacity: [B, H], tokens for which there is room, rounded up to pages; 0 in heads that keep no channels of K
    page: tokens of a page of K
    k, v: the flat tensors
    k_start, v_start: [B, H], first element of each region
    width: [B, H], kept channels of V
    """

    page = PAGE

    def __init__(self, extent: Extent) -> None:
        self.channels, self.values = extent.channels, extent.values
        self.head_dim, self.dtype = extent.head_dim, extent.dtype
        device = self.channels.index.device
        self.capacity = np.where(self.channels.count > 0, round_up(extent.capacity, PAGE), 0).astype(np.int64)
        self.width = np.full_like(self.capacity, self.head_dim) if self.values is None else self.values.count
        (k_size, _), (v_size, _) = self._sizes()
        self.k_start, self.v_start = _exclusive(k_size), _exclusive(v_size)
        stored = self._form()
        self.k = torch.empty(int(k_size.sum()), dtype=stored, device=device)
        self.v = torch.empty(int(v_size.sum()), dtype=stored, device=device)
        self._places: Tensor | None = None

    def _form(self) -> torch.dtype:
        """The dtype of k and v."""
        return self.dtype

    def _sizes(self) -> tuple[tuple[np.ndarray, int], ...]:
        """For K and for V: (elements of each region [B, H], elements of a line, which divides every region)."""
        v_line = self.head_dim if self.values is None else PAGE
        return (self.capacity * self.channels.count, PAGE), (self.capacity * self.width, v_line)

    def views(self, row: int, number: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of one head's regions in `number` rows of the same layout from `row` on.

        Returns K [number, pages, channels, tokens of a page] and V [number, capacity, D], where it is pruned as K.
        """
        cap, count, width = (int(a[row, head]) for a in (self.capacity, self.channels.count, self.width))
        k_row, v_row = (int(a[row + 1, head] - a[row, head]) if number > 1 else 0 for a in (self.k_start, self.v_start))
        k_start, v_start = int(self.k_start[row, head]), int(self.v_start[row, head])

        def pages(flat: Tensor, step: int, channels: int, start: int, page: int) -> Tensor:
            shape = (number, cap // page, channels, page)
            return flat.as_strided(shape, (step, channels * page, page, 1), start)

        if self.values is None:
            values = self.v.as_strided((number, cap, width), (v_row, width, 1), v_start)
        else:
            values = pages(self.v, v_row, width, v_start, PAGE)
        return pages(self.k, k_row, count, k_start, self.page), values

    def flats(self) -> tuple[tuple[Tensor, np.ndarray, np.ndarray, int], ...]:
        """For K and for V: (flat tensor, first element of each region, size of each, elements of a line)."""
        k, v = self._sizes()
        return (self.k, self.k_start, *k), (self.v, self.v_start, *v)

    def places(self) -> Tensor:
        """[B, H, 4] int64 on the device: first element of K and of V, then kept channels of both, 0 without room."""
        if self._places is None:
            count, width = (np.where(self.capacity > 0, n, 0) for n in (self.channels.count, self.width))
            self._places = upload(np.stack([self.k_start, self.v_start, count, width], -1), self.k.device)
        return self._places
