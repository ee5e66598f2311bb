"""What a sealed layer holds: sink | middle | window, per row and in real tokens (LeanK, section 3.3).

A row's real tokens are numbered 0, 1, ... whatever its padding. Tokens below `sink` stay in the sink, the last ones
in the window, a ring in which token i has slot i mod capacity; those between are in the middle. The window holds
`window` tokens after the prompt and up to `window + flush` while decoding; whenever it is that full its oldest
`flush` tokens move to the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.cache.channels import MaskChannels
from eval.cache.pages import PAGE, Segment, round_up

GROWTH = 128  # smallest slack, in tokens, that a growing middle takes at once; 1/16 of its length if that is more


@dataclass(frozen=True)
class Sizes:
    """Tokens kept whole at both ends, and how many leave the window at a time."""

    sink: int = 128
    window: int = 1024
    flush: int = 32

    def __post_init__(self):
        if self.sink < 0 or self.window < 1 or self.flush < 1:
            raise ValueError(f"need sink >= 0, window >= 1, flush >= 1, got {self.sink}, {self.window}, {self.flush}")

    @property
    def ring(self) -> int:
        """Slots of the window's ring."""
        return round_up(self.window + self.flush, PAGE)


class Store:
    """The three parts of one layer for a batch of B rows.

    Host: seen [B] real tokens, start [B] the first one in the window, floor [B] the length that `crop` cannot go below.
    Device: sink_k, sink_v [B, H, sink, D]; ring_k, ring_v [B, H, slots, D]; seen_dev, start_dev [B] int64.
    segments: the middle: first the prompt's share, exactly as long as it is, then what decoding adds.
    """

    def __init__(self, k: Tensor, v: Tensor, real: Tensor | None, chooser: MaskChannels, sizes: Sizes):
        """Seal a prompt: k, v [B, H, T, D]; real [B, T] bool, False = padding, None = all real."""
        batch, heads, length, dim = k.shape
        self.sizes, self.channels = sizes, chooser.choose(k)
        self.version = 0  # grows when addresses or capacities change, so that a kernel's plan can follow
        self.plan: Any = None
        count = torch.full((batch,), length) if real is None else real.sum(-1).cpu()
        self.seen = count.numpy().astype(np.int64)
        self.start = np.maximum(sizes.sink, self.seen - sizes.window)
        self.floor = np.where(self.start > sizes.sink, self.seen, 0)
        self.seen_dev, self.start_dev = (torch.tensor(a, device=k.device) for a in (self.seen, self.start))
        self.sink_k, self.sink_v = (k.new_zeros(batch, heads, sizes.sink, dim) for _ in range(2))
        self.ring_k, self.ring_v = (k.new_zeros(batch, heads, sizes.ring, dim) for _ in range(2))
        position = self._number(torch.zeros_like(self.seen_dev), length, real)
        self._write(k, v, position)
        self.prompt: Segment | None = None
        self.tail: Segment | None = None
        if (self.start > sizes.sink).any():
            self.prompt = Segment(self.channels, (self.start - sizes.sink)[:, None].repeat(heads, 1), dim, k.dtype)
            in_middle = (position >= sizes.sink) & (position < self.start_dev[:, None])
            self._seal(k, v, in_middle[:1] if real is None else in_middle)

    def _seal(self, k: Tensor, v: Tensor, in_middle: Tensor) -> None:
        """Store the prompt's middle, rows of equal padding together; in_middle [B, T], or [1, T] for all rows."""
        assert self.prompt is not None
        patterns, which = np.unique(in_middle.cpu().numpy(), axis=0, return_inverse=True)
        which = np.broadcast_to(which.reshape(-1), (len(k),))
        for i, pattern in enumerate(patterns):
            rows, columns = np.nonzero(which == i)[0], np.nonzero(pattern)[0]
            if len(columns) == 0:
                continue
            first, last = int(columns[0]), int(columns[-1]) + 1
            at = slice(first, last) if last - first == len(columns) else torch.from_numpy(columns).to(k.device)
            some = slice(None) if len(rows) == len(k) else torch.from_numpy(rows).to(k.device)
            self.prompt.append(rows, k[some][:, :, at], v[some][:, :, at])

    @property
    def segments(self) -> list[Segment]:
        """The parts of the middle, oldest first."""
        return [s for s in (self.prompt, self.tail) if s is not None]

    @staticmethod
    def _number(seen: Tensor, new: int, real: Tensor | None) -> Tensor:
        """[B, new] the real index of each new column of rows that hold `seen` [B] tokens; -1 for padding."""
        if real is None:
            return seen[:, None] + torch.arange(new, device=seen.device)
        real = real.to(seen.device)
        return torch.where(real, seen[:, None] + torch.cumsum(real, -1) - 1, -1)

    def _write(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Put columns of real index [start, ...) into the ring and [0, sink) into the sink."""
        for keys, values, to, chosen in (
            (self.ring_k, self.ring_v, position % self.ring_k.shape[2], position >= self.start_dev[:, None]),
            (self.sink_k, self.sink_v, position, (position >= 0) & (position < self.sizes.sink)),
        ):
            row, column = chosen.nonzero(as_tuple=True)
            keys[row, :, to[row, column]] = k[row, :, column]
            values[row, :, to[row, column]] = v[row, :, column]

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """Take in new tokens k, v [B, H, n, D] (real [B, n], None = all): returns their real indices [B, n], -1 =
        padding."""
        new = k.shape[2]
        self._fit(new)
        position = self._number(self.seen_dev, new, real)
        if real is None:
            if (self.seen < self.sizes.sink).any():
                self._write(k, v, position)
            else:  # the path of every decoding step: no host waits for the device
                row, slot = torch.arange(len(k), device=k.device)[:, None], position % self.ring_k.shape[2]
                self.ring_k[row, :, slot] = k.transpose(1, 2)
                self.ring_v[row, :, slot] = v.transpose(1, 2)
            self.seen += new
            self.seen_dev += new
        else:
            self._write(k, v, position)
            self.seen += real.sum(-1).cpu().numpy()
            self.seen_dev.copy_(torch.from_numpy(self.seen))
            self.floor = self.seen.copy()
        return position

    def flush(self) -> None:
        """Move what is due from the window to the middle: `flush` tokens each time it holds `window + flush`."""
        size = self.sizes
        over = np.maximum(0, self.seen - self.start - size.window)
        due = over // size.flush * size.flush
        if due.any():
            for amount in np.unique(due[due > 0]):
                rows = np.nonzero(due == amount)[0]
                rows_dev = torch.from_numpy(rows).to(self.seen_dev.device)
                index = self.start_dev[rows_dev, None] + torch.arange(int(amount), device=self.seen_dev.device)
                slot = index % self.ring_k.shape[2]
                k, v = (x[rows_dev[:, None], :, slot].transpose(1, 2) for x in (self.ring_k, self.ring_v))
                self._room(rows, int(amount)).append(rows, k, v)
            self.start = self.start + due
            self.start_dev.copy_(torch.from_numpy(self.start))
            self.floor = np.where(due > 0, self.seen, self.floor)
        self._fit(0)

    def _room(self, rows: np.ndarray, new: int) -> Segment:
        """The tail, with room for `new` more tokens in each of `rows`."""
        need = new if self.tail is None else int(self.tail.length[rows].max()) + new
        if self.tail is None or need > int(self.tail.capacity.max()):
            capacity = np.full(self.channels.count.shape, need + max(GROWTH, need // 16) - self.sizes.flush)
            self.tail = (
                Segment(self.channels, capacity, self.ring_k.shape[-1], self.ring_k.dtype)
                if self.tail is None
                else self.tail.grown(capacity)
            )
            self.version += 1
        return self.tail

    def _fit(self, new: int) -> None:
        """Give the ring room for `new` more tokens in every row, or its usual size back."""
        held = int(np.maximum(0, self.seen - self.start).max()) + new
        old, slots = self.ring_k.shape[2], max(self.sizes.ring, round_up(held, PAGE))
        if slots == old or (slots < old and new):
            return
        index = self.start_dev[:, None] + torch.arange(min(held, old), device=self.start_dev.device)
        row = torch.arange(len(index), device=index.device)[:, None]
        for name in ("ring_k", "ring_v"):
            ring = getattr(self, name)
            moved = ring.new_zeros(*ring.shape[:2], slots, ring.shape[3])
            moved[row, :, index % slots] = ring[row, :, index % old]
            setattr(self, name, moved)
        self.version += 1

    def crop(self, remove: int) -> None:
        """Forget the last `remove` tokens of every row.

        Raises ValueError if that would need tokens back that have been compressed.
        """
        if (self.seen - remove < self.floor).any():
            can = int((self.seen - self.floor).min())
            raise ValueError(
                f"cannot crop {remove} tokens: at most {can} came after the last move to the compressed middle. "
                "Call cache.activate_past_recording() first; tokens then wait in the window until crop() is called"
            )
        self.seen -= remove
        self.seen_dev -= remove

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one (beam search, repeats, dropped rows)."""
        at, dev = rows.cpu().numpy(), rows.to(self.seen_dev.device)
        self.seen, self.start, self.floor = self.seen[at], self.start[at], self.floor[at]
        self.seen_dev, self.start_dev = self.seen_dev[dev], self.start_dev[dev]
        self.channels = self.channels.select(rows)
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            setattr(self, name, getattr(self, name)[dev])
        self.prompt = self.prompt and self.prompt.select(rows, self.channels)
        self.tail = self.tail and self.tail.select(rows, self.channels)
        self.version += 1

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        for name in ("sink_k", "sink_v", "ring_k", "ring_v", "seen_dev", "start_dev"):
            setattr(self, name, getattr(self, name).to(device))
        self.channels.index = self.channels.index.to(device)
        for segment in self.segments:
            segment.to(device)
        self.version += 1

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        names = ("sink_k", "sink_v", "ring_k", "ring_v", "seen_dev", "start_dev")
        parts = {"prompt": self.prompt, "tail": self.tail}
        middle = {f"{p}.{n}": t for p, s in parts.items() if s is not None for n, t in s.tensors().items()}
        plan = {} if self.plan is None else {"plan": self.plan.table}
        return {**{n: getattr(self, n) for n in names}, "channels": self.channels.index, **middle, **plan}
