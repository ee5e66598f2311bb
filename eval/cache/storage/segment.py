"""Middle tokens of a layer, ragged: each row and KV head holds its own number of tokens and of K channels.

Where they lie is eval.cache.storage.pages, how they get there eval.cache.storage.writing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.pages import Extent, Regions, spread, words
from leank.eval.cache.storage.upload import update, upload
from leank.eval.cache.storage.writing import write


def _stretched(start: np.ndarray, size: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Where the lines of larger regions come from: all of them in one copy, the spare ones repeat some line.

    start, size: first line and lines of each region that is there
    room: lines of each new region, no fewer
    """
    own = np.arange(room.sum()) - np.repeat(np.cumsum(room) - room, room)
    source = np.repeat(start, room) + np.minimum(own, np.repeat(np.maximum(size, 1) - 1, room))
    return np.minimum(source, size.sum() - 1)


class Segment(Regions):
    """Middle tokens of all rows and heads, in the regions that an extent asks for.

    Attributes, beside those of `Regions`:
    length, length_dev: [B, H], tokens held, on the host and on the device
    """

    def __init__(self, extent: Extent) -> None:
        super().__init__(extent)
        self.length = np.zeros_like(self.capacity)
        self.length_dev = torch.zeros(self.capacity.shape, dtype=torch.int64, device=self.k.device)

    def fresh(self, channels: KeptChannels, capacity: np.ndarray, values: KeptChannels | None) -> Segment:
        """An empty segment of the same form; the parameters are those of `Extent`."""
        return self._of_form(Extent(channels, capacity, self.head_dim, self.dtype, values))

    def _of_form(self, extent: Extent) -> Segment:
        """An empty segment of this form."""
        return type(self)(extent)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens to every head of some rows that has room; kept channels are picked here.

        rows: [R], the rows of the batch
        k, v: [R, H, n, D], dense
        count: [R, H], each head takes its first `count` tokens; None = all n
        """
        taken = np.where(self.capacity[rows] > 0, k.shape[2] if count is None else count, 0)
        write(self, self.length, rows, k, v, taken)
        self.length[rows] += taken
        update(self.length_dev, self.length)

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """One head's regions: K [pages, channels, tokens of a page], V [capacity, D], where it is pruned as K."""
        k, v = self.views(row, 1, head)
        return k[0], v[0]

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """K [n, channels] and V [n, D] of one head; pruned channels of V are zero."""
        n, (k, v) = int(self.length[row, head]), self._regions(row, head)
        keys = k.transpose(1, 2).flatten(0, 1)[:n]
        if self.values is None:
            return keys, v[:n]
        whole = v.new_zeros(n, self.head_dim)
        whole[:, self.values.index[row, head, : v.shape[1]].long()] = v.transpose(1, 2).flatten(0, 1)[:n]
        return keys, whole

    def keys_of(self, stored: Tensor) -> Tensor:
        """The keys [B H, channels, N] of all heads from what is stored of them, of the same shape here."""
        return stored

    def held(self) -> tuple[int, int]:
        """Bytes of K and of V of the tokens held; spare room is not counted."""
        k, v = (int((self.length * channels).sum()) for channels in (self.channels.count, self.width))
        return k * self.k.element_size(), v * self.v.element_size()

    @torch.no_grad()
    def grown(self, capacity: np.ndarray) -> Segment:
        """A copy with room for `capacity` [B, H] tokens, in no head fewer than now."""
        new = self.fresh(self.channels, capacity, self.values)
        for (old, start, size, _), (flat, _, room, _) in zip(self.flats(), new.flats(), strict=True):
            if self.length.any() and size.any():  # else there is nothing to copy
                line = int(np.gcd.reduce([size, room], axis=None))
                source = upload(_stretched(*(a.reshape(-1) // line for a in (start, size, room))), flat.device)
                torch.index_select(words(old, line), 0, source, out=words(flat, line))
        new.length, new.length_dev = self.length, self.length_dev
        return new

    def select(self, rows: Tensor, channels: KeptChannels, values: KeptChannels | None) -> Segment:
        """The segment of the batch `rows` [R], in that order, whose tables are `channels` and `values`."""
        at = rows.cpu().numpy()
        new = self.fresh(channels, self.capacity[at], values)
        for (old, start, _, line), (flat, _, size, _) in zip(self.flats(), new.flats(), strict=True):
            source = spread(start[at] // line, size // line, flat.device)
            torch.index_select(words(old, line), 0, source, out=words(flat, line))
        new.length, new.length_dev = self.length[at], self.length_dev[rows.to(self.k.device)]
        return new

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        self.k, self.v, self.length_dev = self.k.to(device), self.v.to(device), self.length_dev.to(device)
        self._places = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name (the channel tables are the store's)."""
        places = {} if self._places is None else {"places": self._places}
        return {"k": self.k, "v": self.v, "length": self.length_dev, **places}


class TokenSegment(Segment):
    """A Segment whose pages of K hold one token, so that a region of K is token-major, [token, channel].

    A token's key is then one piece of memory. In a page of 64 tokens each of its numbers lies in another line.
    """

    page = 1
