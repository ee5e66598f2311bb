"""Ragged storage of middle tokens: per row and KV head its own number of tokens and of K channels.

K lies channel-major in pages of 64 tokens, [page, channel, 64], so that any number of channels gives aligned,
contiguous reads; V lies token-major, [token, D]. Rows, then heads, follow each other in one flat K and one flat V
tensor. A head that keeps no channels has no region in either.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eval.cache.channels import KeptChannels

PAGE = 64
_CHUNK = 1 << 22  # elements scattered at once: bounds the index tensors of a long prompt


def round_up(n, multiple: int):
    """n (int or array) rounded up to a multiple."""
    return -(-n // multiple) * multiple


def _exclusive(sizes: np.ndarray) -> np.ndarray:
    """Start of each of the regions of `sizes` [B, H] that follow each other."""
    flat = sizes.reshape(-1)
    return (np.cumsum(flat) - flat).reshape(sizes.shape)


def _spread(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Tensor:
    """Concatenated ranges start, start+1, ..., start+size-1 of every region, int64 on `device`."""
    start, size = (torch.from_numpy(np.ascontiguousarray(a).reshape(-1)).to(device) for a in (starts, sizes))
    total = int(sizes.sum())
    first = torch.cumsum(size, 0) - size
    return torch.repeat_interleave(start - first, size, output_size=total) + torch.arange(total, device=device)


class Segment:
    """Room for `capacity` [B, H] middle tokens (multiples of 64, 0 for heads that keep no channels).

    Attributes: k, v flat; k_start, v_start [B, H] first element of each region; length [B, H] tokens held (host),
    `length_dev` the same on the device.
    """

    def __init__(self, channels: KeptChannels, capacity: np.ndarray, head_dim: int, dtype: torch.dtype):
        device = channels.index.device
        self.channels, self.head_dim = channels, head_dim
        self.capacity = np.where(channels.count > 0, round_up(capacity, PAGE), 0).astype(np.int64)
        k_size = self.capacity * channels.count
        self.k_start, self.v_start = _exclusive(k_size), _exclusive(self.capacity) * head_dim
        self.k = torch.empty(int(k_size.sum()), dtype=dtype, device=device)
        self.v = torch.empty(int(self.capacity.sum()) * head_dim, dtype=dtype, device=device)
        self.length = np.zeros_like(self.capacity)
        self.length_dev = torch.zeros(self.capacity.shape, dtype=torch.int64, device=device)
        self._lanes: tuple[Tensor, ...] | None = None

    def _build_lanes(self) -> tuple[Tensor, ...]:
        """One lane per (row, head, kept channel): row, head, channel, first element, elements per page."""
        device = self.k.device
        count = np.where(self.capacity > 0, self.channels.count, 0)
        where = np.nonzero(count.reshape(-1))[0]
        lane = np.repeat(where, count.reshape(-1)[where])
        rank = _spread(np.zeros_like(count), count, torch.device("cpu")).numpy()
        row, head = np.divmod(lane, count.shape[1])
        base = self.k_start[row, head] + rank * PAGE
        page = count[row, head] * PAGE
        row_t, head_t, rank_t, base_t, page_t = (torch.from_numpy(x).to(device) for x in (row, head, rank, base, page))
        v_row, v_head = np.divmod(where, count.shape[1])
        v_base = self.v_start[v_row, v_head] // self.head_dim
        v_lanes = tuple(torch.from_numpy(x).to(device) for x in (v_row, v_head, v_base))
        return row_t, head_t, self.channels.index[row_t, head_t, rank_t].long(), base_t, page_t, *v_lanes

    def append(self, rows: np.ndarray, k: Tensor, v: Tensor) -> None:
        """Add n tokens to every head of the batch rows [R]: k, v [R, H, n, D], dense; kept channels are picked here."""
        if self._lanes is None:
            self._lanes = self._build_lanes()
        row, head, channel, base, page, v_row, v_head, v_base = self._lanes
        n, device = k.shape[2], self.k.device
        if len(rows) < len(self.capacity):
            source = torch.full((len(self.capacity),), -1)
            source[torch.from_numpy(rows)] = torch.arange(len(rows))
            source = source.to(device)
            use, v_use = source[row] >= 0, source[v_row] >= 0
            row, head, channel, base, page = (x[use] for x in (row, head, channel, base, page))
            v_row, v_head, v_base = (x[v_use] for x in (v_row, v_head, v_base))
            from_row, from_v_row = source[row], source[v_row]
        else:
            from_row, from_v_row = row, v_row
        k_at, v_at = self.length_dev[row, head][:, None], self.length_dev[v_row, v_head][:, None]
        step = max(1, _CHUNK // max(1, len(row)))
        for first in range(0, n, step) if len(row) else ():
            last = min(first + step, n)
            token = k_at + torch.arange(first, last, device=device)
            to = base[:, None] + token // PAGE * page[:, None] + token % PAGE
            self.k[to] = k[:, :, first:last][from_row, head, :, channel]
            to = v_base[:, None] + v_at + torch.arange(first, last, device=device)
            self.v.view(-1, self.head_dim)[to] = v[from_v_row, v_head, first:last]
        held = (self.capacity[rows] > 0) * n
        self.length[rows] += held
        if len(rows) < len(self.capacity):
            self.length_dev.copy_(torch.from_numpy(self.length))
        else:
            self.length_dev += torch.from_numpy(held).to(device)

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """(K [n, channels], V [n, D]) of one head."""
        n, cap, count = (int(a[row, head]) for a in (self.length, self.capacity, self.channels.count))
        k_start, v_start = int(self.k_start[row, head]), int(self.v_start[row, head])
        k = self.k[k_start : k_start + cap * count].view(cap // PAGE, count, PAGE)
        v = self.v[v_start : v_start + cap * self.head_dim].view(cap, self.head_dim)
        return k.transpose(1, 2).reshape(cap, count)[:n], v[:n]

    def grown(self, capacity: np.ndarray) -> Segment:
        """A copy with room for `capacity` [B, H] >= the present one."""
        new = Segment(self.channels, capacity, self.head_dim, self.k.dtype)
        pages = self.capacity * self.channels.count // PAGE
        new.k.view(-1, PAGE)[_spread(new.k_start // PAGE, pages, self.k.device)] = self.k.view(-1, PAGE)
        lines = _spread(new.v_start // self.head_dim, self.capacity, self.k.device)
        new.v.view(-1, self.head_dim)[lines] = self.v.view(-1, self.head_dim)
        new.length, new.length_dev = self.length, self.length_dev
        return new

    def select(self, rows: Tensor, channels: KeptChannels) -> Segment:
        """The segment of the batch `rows` [R], in that order; `channels` is their table."""
        at, dim, device = rows.cpu().numpy(), self.head_dim, self.k.device
        new = Segment(channels, self.capacity[at], dim, self.k.dtype)
        pages = _spread(self.k_start[at] // PAGE, new.capacity * channels.count // PAGE, device)
        torch.index_select(self.k.view(-1, PAGE), 0, pages, out=new.k.view(-1, PAGE))
        lines = _spread(self.v_start[at] // dim, new.capacity, device)
        torch.index_select(self.v.view(-1, dim), 0, lines, out=new.v.view(-1, dim))
        new.length, new.length_dev = self.length[at], self.length_dev[rows.to(device)]
        return new

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        self.k, self.v, self.length_dev = self.k.to(device), self.v.to(device), self.length_dev.to(device)
        self._lanes = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name (the channel table is the store's)."""
        lanes = {f"lane{i}": t for i, t in enumerate(self._lanes or ())}
        return {"k": self.k, "v": self.v, "length": self.length_dev, **lanes}
