"""Ragged storage of middle tokens: per row and KV head its own number of tokens and of K channels.

K lies channel-major in pages of 64 tokens, [page, channel, 64], so that any number of channels gives aligned,
contiguous reads; V lies token-major, [token, D], or [token, kept channels] where V is pruned. Rows, then heads, follow
each other in one flat K and one flat V tensor. A head that keeps no channels of K has no region in either.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eval.cache.channels import KeptChannels

PAGE = 64
CHUNK = 1 << 22  # elements scattered at once: bounds the index tensors of a long prompt


def round_up(n, multiple: int):
    """n (int or array) rounded up to a multiple."""
    return -(-n // multiple) * multiple


def _exclusive(sizes: np.ndarray) -> np.ndarray:
    """Start of each of the regions of `sizes` [B, H] that follow each other."""
    flat = sizes.reshape(-1)
    return (np.cumsum(flat) - flat).reshape(sizes.shape)


def spread(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Tensor:
    """Concatenated ranges start, start+1, ..., start+size-1 of every region, int64 on `device`."""
    start, size = (torch.from_numpy(np.ascontiguousarray(a).reshape(-1)).to(device) for a in (starts, sizes))
    total = int(sizes.sum())
    first = torch.cumsum(size, 0) - size
    return torch.repeat_interleave(start - first, size, output_size=total) + torch.arange(total, device=device)


def lines(flat: Tensor, width: int) -> Tensor:
    """A flat tensor, possibly empty, as lines of `width` elements."""
    return flat.view(flat.numel() // width, width)


def _put(flat: Tensor, to: Tensor, new: Tensor, some: Tensor | None) -> None:
    """flat[to] = new, where `some` is true (None = everywhere)."""
    if some is None:
        flat[to] = new
    else:
        flat[to[some]] = new[some]


class Segment:
    """Room for `capacity` [B, H] middle tokens (multiples of 64, 0 for heads that keep no channels).

    values: kept channels of V, None = all. Attributes: k, v flat; k_start, v_start [B, H] first element of each region;
    width [B, H] kept channels of V; length [B, H] tokens held (host), `length_dev` the same on the device.
    """

    DATA: tuple[str, ...] = ("k", "v")  # the tensors that hold tokens; all others are tables

    def __init__(
        self,
        channels: KeptChannels,
        capacity: np.ndarray,
        head_dim: int,
        dtype: torch.dtype,
        values: KeptChannels | None = None,
    ):
        device = channels.index.device
        self.channels, self.values, self.head_dim, self.dtype = channels, values, head_dim, dtype
        self.capacity = np.where(channels.count > 0, round_up(capacity, PAGE), 0).astype(np.int64)
        self.width = np.full_like(self.capacity, head_dim) if values is None else values.count
        (k_size, _), (v_size, _) = self._sizes()
        self.k_start, self.v_start = _exclusive(k_size), _exclusive(v_size)
        stored = self._form()[0]
        self.k = torch.empty(int(k_size.sum()), dtype=stored, device=device)
        self.v = torch.empty(int(v_size.sum()), dtype=stored, device=device)
        self.length = np.zeros_like(self.capacity)
        self.length_dev = torch.zeros(self.capacity.shape, dtype=torch.int64, device=device)
        self._lanes: tuple[Tensor, ...] | None = None

    def fresh(self, channels: KeptChannels, capacity: np.ndarray, values: KeptChannels | None) -> Segment:
        """An empty segment that stores as this one does."""
        return Segment(channels, capacity, self.head_dim, self.dtype, values)

    def _form(self) -> tuple[torch.dtype, int, int]:
        """dtype of k and v, and how many of its elements hold how many numbers."""
        return self.dtype, 1, 1

    def _sizes(self) -> tuple[tuple[np.ndarray, int], ...]:
        """Of K and of V: elements of each region [B, H], and of a line that divides all."""
        _, elements, numbers = self._form()
        v_line = self.head_dim if self.values is None else PAGE
        parts = ((self.channels.count, PAGE), (self.width, v_line))
        return tuple((self.capacity * n // numbers * elements, line // numbers * elements) for n, line in parts)

    def _channel_lanes(self, table: KeptChannels) -> tuple[np.ndarray, ...]:
        """One lane per (row, head, kept channel) of heads with room: row, head, rank of the channel."""
        count = np.where(self.capacity > 0, table.count, 0)
        where = np.nonzero(count.reshape(-1))[0]
        lane = np.repeat(where, count.reshape(-1)[where])
        rank = spread(np.zeros_like(count), count, torch.device("cpu")).numpy()
        return (*np.divmod(lane, count.shape[1]), rank)

    def _build_lanes(self) -> tuple[Tensor, ...]:
        """Of K: row, head, channel, first element, elements per page. Of V: row, head, and first line of D elements;
        where it is pruned row, head, channel, first element, elements per token."""
        row, head, rank = self._channel_lanes(self.channels)
        k = (row, head, rank, self.k_start[row, head] + rank * PAGE, self.channels.count[row, head] * PAGE)
        if self.values is None:
            row, head = np.nonzero(self.capacity)
            v: tuple[np.ndarray, ...] = (row, head, self.v_start[row, head] // self.head_dim)
        else:
            row, head, rank = self._channel_lanes(self.values)
            v = (row, head, rank, self.v_start[row, head] + rank, self.width[row, head])
        lanes = [torch.from_numpy(np.ascontiguousarray(x)).to(self.k.device) for x in (*k, *v)]
        lanes[2] = self.channels.index[lanes[0], lanes[1], lanes[2]].long()
        if self.values is not None:
            lanes[7] = self.values.index[lanes[5], lanes[6], lanes[7]].long()
        return tuple(lanes)

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor, count: np.ndarray | None = None) -> None:
        """Add n tokens to the heads of the batch rows [R] that have room: k, v [R, H, n, D], dense; kept channels are
        picked here.

        count [R, H]: how many of the n tokens each head takes, the first ones; None = all.
        """
        if self._lanes is None:
            self._lanes = self._build_lanes()
        n, device = k.shape[2], self.k.device
        taken = np.where(self.capacity[rows] > 0, n if count is None else count, 0)
        source = torch.full((len(self.capacity),), -1)
        source[torch.from_numpy(rows)] = torch.arange(len(rows))
        source = source.to(device)
        limit = None if count is None else torch.from_numpy(taken).to(device)
        k_lanes, v_lanes = self._lanes[:5], self._lanes[5:]
        if len(rows) < len(self.capacity):
            k_lanes, v_lanes = (tuple(x[source[lanes[0]] >= 0] for x in lanes) for lanes in (k_lanes, v_lanes))
        step = max(1, CHUNK // max(1, len(k_lanes[0])))
        for first in range(0, n, step) if len(k_lanes[0]) else ():
            new = torch.arange(first, min(first + step, n), device=device)
            row, head, channel, base, page = k_lanes
            token = self.length_dev[row, head][:, None] + new
            to = base[:, None] + token // PAGE * page[:, None] + token % PAGE
            some = None if limit is None else new < limit[source[row], head][:, None]
            _put(self.k, to, k[:, :, first : first + step][source[row], head, :, channel], some)
            row, head = v_lanes[:2]
            token = self.length_dev[row, head][:, None] + new
            some = None if limit is None else new < limit[source[row], head][:, None]
            if self.values is None:
                to = v_lanes[2][:, None] + token
                _put(lines(self.v, self.head_dim), to, v[source[row], head, first : first + step], some)
            else:
                channel, base, width = v_lanes[2:]
                to = base[:, None] + token * width[:, None]
                _put(self.v, to, v[:, :, first : first + step][source[row], head, :, channel], some)
        self.length[rows] += taken
        if len(rows) < len(self.capacity):
            self.length_dev.copy_(torch.from_numpy(self.length))
        else:
            self.length_dev += torch.from_numpy(taken).to(device)

    def _regions(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of one head's room: K [pages, channels, 64], V [capacity, kept channels]."""
        cap, count, width = (int(a[row, head]) for a in (self.capacity, self.channels.count, self.width))
        k_start, v_start = int(self.k_start[row, head]), int(self.v_start[row, head])
        k = self.k[k_start : k_start + cap * count].view(cap // PAGE, count, PAGE)
        return k, self.v[v_start : v_start + cap * width].view(cap, width)

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """(K [n, channels], V [n, D]) of one head; zero in pruned channels of V."""
        n, (k, v) = int(self.length[row, head]), self._regions(row, head)
        keys, v = k.transpose(1, 2).flatten(0, 1)[:n], v[:n]
        if self.values is None:
            return keys, v
        whole = v.new_zeros(n, self.head_dim)
        whole[:, self.values.index[row, head, : v.shape[1]].long()] = v
        return keys, whole

    def held(self) -> tuple[int, int]:
        """Bytes of K and of V that the tokens held take, room not counted."""
        k, v = (int((self.length * channels).sum()) for channels in (self.channels.count, self.width))
        return k * self.k.element_size(), v * self.v.element_size()

    def _parts(self) -> tuple[tuple[Tensor, np.ndarray, np.ndarray, int], ...]:
        """Of K and of V: flat tensor, first element and size of each region, elements per line, which divides all."""
        k, v = self._sizes()
        return (self.k, self.k_start, *k), (self.v, self.v_start, *v)

    def grown(self, capacity: np.ndarray) -> Segment:
        """A copy with room for `capacity` [B, H] >= the present one."""
        new = self.fresh(self.channels, capacity, self.values)
        for (old, start, size, line), (flat, to, _, _) in zip(self._parts(), new._parts(), strict=True):
            target, source = (spread(s // line, size // line, flat.device) for s in (to, start))
            lines(flat, line)[target] = lines(old, line)[source]
        new.length, new.length_dev = self.length, self.length_dev
        return new

    def select(self, rows: Tensor, channels: KeptChannels, values: KeptChannels | None) -> Segment:
        """The segment of the batch `rows` [R], in that order; `channels` and `values` are their tables."""
        at = rows.cpu().numpy()
        new = self.fresh(channels, self.capacity[at], values)
        for (old, start, _, line), (flat, _, size, _) in zip(self._parts(), new._parts(), strict=True):
            source = spread(start[at] // line, size // line, flat.device)
            torch.index_select(lines(old, line), 0, source, out=lines(flat, line))
        new.length, new.length_dev = self.length[at], self.length_dev[rows.to(self.k.device)]
        return new

    def compacted(self, stay: list[list[Tensor]]) -> Segment:
        """A copy of only the tokens that stay, with no more room than they need; stay[row][head] [length] bool."""
        index = [[s.nonzero()[:, 0] for s in heads] for heads in stay]
        length = np.array([[len(i) for i in heads] for heads in index], dtype=np.int64)
        new = self.fresh(self.channels, length, self.values)
        for row, head in np.ndindex(*length.shape):
            old, to = index[row][head], torch.arange(int(length[row, head]), device=self.k.device)
            (old_k, old_v), (k, v) = self._regions(row, head), new._regions(row, head)
            k[to // PAGE, :, to % PAGE] = old_k[old // PAGE, :, old % PAGE]
            v[to] = old_v[old]
        new.length = length
        new.length_dev.copy_(torch.from_numpy(length))
        return new

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        self.k, self.v, self.length_dev = self.k.to(device), self.v.to(device), self.length_dev.to(device)
        self._lanes = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name (the channel tables are the store's)."""
        lanes = {f"lane{i}": t for i, t in enumerate(self._lanes or ())}
        return {"k": self.k, "v": self.v, "length": self.length_dev, **lanes}
