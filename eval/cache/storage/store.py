"""What a sealed layer holds: sink | middle | window, per row and in real tokens (LeanK, section 3.3).

A row's real tokens are numbered 0, 1, ... whatever its padding. Tokens below `sink` stay in the sink, the last ones
in the window, a ring in which token i has slot i mod capacity; those between are in the middle. The window holds
`window` tokens after the prompt and up to `window + flush` while decoding; whenever it is that full its oldest
`flush` tokens move to the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.cache.storage.channels import KeptChannels
from eval.cache.storage.eviction import Eviction
from eval.cache.storage.middle import Middle
from eval.cache.storage.pages import PAGE, Segment, round_up
from eval.cache.storage.sizes import Sizes, middle_columns, real_positions
from eval.cache.storage.upload import update, upload

Write = Callable[["Store", Tensor, Tensor], Tensor]
Move = Callable[["Store", np.ndarray], None]
GROWTH = 128  # smallest slack, in tokens, that a growing middle takes at once; 1/16 of its length if that is more


def capturing(x: Tensor) -> bool:
    """Whether operations on x are being recorded into a CUDA graph, so that nothing is appended yet."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _padded_left_only(real: Tensor | None, batch: int) -> np.ndarray:
    """Of which rows [B] every column taken off the end is a real token until none is left; real [B, T], None = all."""
    if real is None:
        return np.ones(batch, dtype=bool)
    return (real[:, 1:] >= real[:, :-1]).all(-1).cpu().numpy()


class Store:
    """The three parts of one layer for a batch of B rows.

    Host: seen [B] real tokens, start [B] the first one in the window, floor [B] the length that `crop` cannot go below.
    Device: sink_k, sink_v [B, H, sink, D]; ring_k, ring_v [B, H, slots, D]; seen_dev, start_dev [B] int64.
    prompt, tail: the middle: the prompt's share, exactly as long as it is, then what decoding adds. channels, values:
    its kept channels of K and V (values None = all).
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        real: Tensor | None,
        middle: Middle,
        sizes: Sizes,
        tokens: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> None:
        """Seal a prompt: k, v [B, H, T, D]; real [B, T] bool, False = padding, None = all real.

        tokens: bool [B, H, T], those of the middle that stay, None = all; sink and window stay whatever it says.
        scores: [B, H, T] attention that each token has received, where the middle evicts; None = zeros.
        """
        batch, heads, length, dim = k.shape
        self.sizes, self.middle = sizes, middle
        self.channels = KeptChannels.of(middle.channels, k)
        self.values = None if middle.values is None else KeptChannels.of(middle.values, v)
        self.quiet = 0  # tokens that may come before `flush` has anything to do, at least
        self.version = 0  # grows when addresses or capacities change, so that a kernel's plan can follow
        self.plan: Any = None
        self.backend: Any = None  # what runs over it, once chosen
        self.seen = np.full(batch, length) if real is None else real.sum(-1).cpu().numpy()
        self.start = np.maximum(sizes.sink, self.seen - sizes.window)
        whole = self.start <= sizes.sink  # rows of which nothing goes to the middle
        self.floor = np.where(whole & _padded_left_only(real, batch), 0, self.seen)
        self.seen_dev, self.start_dev = (upload(a, k.device) for a in (self.seen, self.start))
        self.sink_k, self.sink_v = (k.new_zeros(batch, heads, sizes.sink, dim) for _ in range(2))
        slots = self._slots(int(np.maximum(0, self.seen - self.start).max()))
        self.ring_k, self.ring_v = (k.new_zeros(batch, heads, slots, dim) for _ in range(2))
        position = real_positions(torch.zeros_like(self.seen_dev), length, real)
        if real is None:
            self._write_whole(k, v)
        else:
            self._write(k, v, position)
        in_middle = middle_columns(position, sizes)
        chosen = None if tokens is None else in_middle[:, None] & tokens.to(k.device)  # [B, H, T]
        moved = (self.start - sizes.sink)[:, None].repeat(heads, 1) if chosen is None else chosen.sum(-1).cpu().numpy()
        self.prompt = self._segment(moved, k)
        self.tail = self._segment(np.zeros_like(moved), k)
        if chosen is not None:
            self._seal_chosen(k, v, chosen, moved)
        elif moved.any():
            self._seal(k, v, None if real is None else in_middle)
        self.eviction = None
        if middle.eviction is not None:
            ends = (position >= 0) & ~in_middle
            has_middle = upload(self.channels.count > 0, k.device)[..., None]
            held = ends[:, None] | (has_middle & (in_middle[:, None] if chosen is None else chosen))
            scores = k.new_zeros(batch, heads, length, dtype=torch.float32) if scores is None else scores.float()
            pairs = zip(scores, held.expand_as(scores), strict=True)
            self.eviction = middle.eviction.begin([[s[h] for s, h in zip(*row, strict=True)] for row in pairs])
            self._evict(self.eviction)
        self.reads = None if middle.reads is None else middle.reads.start(self)

    def _segment(self, capacity: np.ndarray, k: Tensor) -> Segment:
        return self.middle.segment(self.channels, capacity, k.shape[-1], k.dtype, self.values)

    def _seal(self, k: Tensor, v: Tensor, in_middle: Tensor | None) -> None:
        """Store the prompt's middle, rows of equal padding together; in_middle [B, T], None = no padding."""
        if in_middle is None:
            columns = slice(self.sizes.sink, int(self.start[0]))
            self.prompt.append(np.arange(len(k)), k[:, :, columns], v[:, :, columns])
            return
        alike: dict[bytes, list[int]] = {}
        patterns = in_middle.cpu().numpy()
        for row, pattern in enumerate(patterns):
            alike.setdefault(pattern.tobytes(), []).append(row)
        for rows in alike.values():
            found = np.flatnonzero(patterns[rows[0]])
            if len(found) == 0:
                continue
            first, last = int(found[0]), int(found[-1]) + 1
            at = slice(first, last) if last - first == len(found) else upload(found, k.device)
            follow = rows[-1] - rows[0] == len(rows) - 1  # views need no copy
            some = slice(rows[0], rows[-1] + 1) if follow else upload(np.array(rows), k.device)
            self.prompt.append(np.array(rows), k[:, :, at][some], v[:, :, at][some])

    def _seal_chosen(self, k: Tensor, v: Tensor, chosen: Tensor, count: np.ndarray) -> None:
        """Store of the prompt's middle the tokens chosen [B, H, T], count [B, H] of them."""
        most = int(count.max())
        columns = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)[..., :most, None]
        columns = columns.expand(-1, -1, -1, k.shape[-1])
        self.prompt.append(np.arange(len(k)), k.gather(2, columns), v.gather(2, columns), count)

    def _write_whole(self, k: Tensor, v: Tensor) -> None:
        """`_write` of a prompt without padding: slices, in every row the same."""
        length, slots, start = k.shape[2], self.ring_k.shape[2], int(self.start[0])
        turn = max(start, length // slots * slots)  # the token from which on slots begin at 0 again
        for new, ring, sink in ((k, self.ring_k, self.sink_k), (v, self.ring_v, self.sink_v)):
            ends = min(length, self.sizes.sink)
            sink[:, :, :ends] = new[:, :, :ends]
            for first, last in ((start, min(turn, length)), (turn, length)):
                if first < last:
                    ring[:, :, first % slots : first % slots + last - first] = new[:, :, first:last]

    def _write(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Put columns of real index [start, ...) into the ring and [0, sink) into the sink."""
        for keys, values, to, chosen in (
            (self.ring_k, self.ring_v, position % self.ring_k.shape[2], position >= self.start_dev[:, None]),
            (self.sink_k, self.sink_v, position, (position >= 0) & (position < self.sizes.sink)),
        ):
            row, column = chosen.nonzero(as_tuple=True)
            keys[row, :, to[row, column]] = k[row, :, column]
            values[row, :, to[row, column]] = v[row, :, column]

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None, write: Write | None = None) -> Tensor:
        """Take in new tokens k, v [B, H, n, D] (real [B, n], None = all real).

        write: puts tokens that all belong into the ring and counts them on the device; None = `write` below. Returns
        their real indices [B, n], -1 = padding.
        """
        new, self.quiet = k.shape[2], 0
        self._fit(new)
        if real is None and (self.seen >= self.sizes.sink).all():  # every decoding step: no host waits for the device
            position = (write or Store.write)(self, k, v)
            self.seen += 0 if capturing(k) else new
            return position
        position = real_positions(self.seen_dev, new, real)
        self._write(k, v, position)
        self.seen += new if real is None else real.sum(-1).cpu().numpy()
        update(self.seen_dev, self.seen)
        if real is not None:
            self.floor = self.seen.copy()
        return position

    def write(self, k: Tensor, v: Tensor) -> Tensor:
        """Put new tokens k, v [B, H, n, D] into the ring and count them on the device: returns their indices [B, n]."""
        position = real_positions(self.seen_dev, k.shape[2], None)
        row, slot = torch.arange(len(k), device=k.device)[:, None], position % self.ring_k.shape[2]
        self.ring_k[row, :, slot] = k.transpose(1, 2)
        self.ring_v[row, :, slot] = v.transpose(1, 2)
        self.seen_dev += k.shape[2]
        return position

    def flush(self, move: Move | None = None) -> None:
        """Move what is due from the window to the middle: `flush` tokens each time it holds `window + flush`.

        move: puts `due` [B] tokens of each row into a tail that has room, None = `move` below.
        """
        size = self.sizes
        over = np.maximum(0, self.seen - self.start - size.window)
        due = over // size.flush * size.flush
        if due.any():
            self._grow(due)
            (move or Store.move)(self, due)
            self.start = self.start + due
            self.floor = np.where(due > 0, self.seen, self.floor)
            if self.reads is not None:
                self.reads.moved(self)
        if self.eviction is not None:
            self._evict(self.eviction)
        self._fit(0)
        self.quiet = size.window + size.flush - int((self.seen - self.start).max()) if self.eviction is None else 0

    def move(self, due: np.ndarray) -> None:
        """Put the oldest `due` [B] tokens of each row's window into the tail; count them, there and in start_dev."""
        for amount in np.unique(due[due > 0]).tolist():
            rows = np.nonzero(due == amount)[0]
            rows_dev = upload(rows, self.seen_dev.device)
            index = self.start_dev[rows_dev, None] + torch.arange(amount, device=self.seen_dev.device)
            slot = index % self.ring_k.shape[2]
            k, v = (x[rows_dev[:, None], :, slot].transpose(1, 2) for x in (self.ring_k, self.ring_v))
            self.tail.append(rows, k, v)
            if self.eviction is not None:
                self._forget(self.eviction, rows, amount)
        update(self.start_dev, self.start + due)

    def _joins(self) -> np.ndarray:
        """Which heads [B, H] take tokens that leave the window."""
        joins = self.channels.count > 0
        return joins if self.middle.joins is None else joins & self.middle.joins.cpu().numpy()

    def _grow(self, due: np.ndarray) -> None:
        """Give the tail room for `due` [B] more tokens, and some to spare, unless it has it."""
        joins = self._joins()
        if (self.tail.length + due[:, None] * joins <= self.tail.capacity).all():
            return
        need = self.tail.length + due.max() * joins
        slack = np.maximum(GROWTH, need // 16)
        self.tail = self.tail.grown(np.maximum(self.tail.capacity, np.where(need > 0, need + slack, 0)))
        self.version += 1

    def _forget(self, policy: Eviction, rows: np.ndarray, amount: int) -> None:
        """Drop the scores of the `amount` tokens that left the window of `rows` in heads that do not take them."""
        end = np.minimum(self.seen, self.sizes.sink)[:, None] + self.prompt.length + self.tail.length
        for row, head in np.argwhere(~self._joins()).tolist():
            if row in rows:
                gone = torch.zeros(amount, dtype=torch.bool, device=self.ring_k.device)
                policy.forget(row, head, int(end[row, head]), gone)

    def _evict(self, policy: Eviction) -> None:
        """Drop the tokens of the middle that the policy gives up."""
        sink, window = np.minimum(self.seen, self.sizes.sink), np.maximum(0, self.seen - self.start)
        pruned = policy.prune(self.prompt, self.tail, sink, window)
        if pruned is not None:
            self.prompt, self.tail = pruned
            self.version += 1

    def _slots(self, held: int) -> int:
        """Slots that a ring of `held` tokens needs: its usual size once there is a middle, before it no spare page."""
        needed = round_up(max(1, held), PAGE)
        return needed if (self.start <= self.sizes.sink).all() else max(self.sizes.ring, needed)

    def _fit(self, new: int) -> None:
        """Give the ring room for `new` more tokens in every row, or its usual size back."""
        held = int(np.maximum(0, self.seen - self.start).max()) + new
        old = self.ring_k.shape[2]
        # on a GPU a captured step may follow, which cannot grow the ring: decoding begins with all of it
        slots = max(self.sizes.ring, round_up(held, PAGE)) if self.ring_k.is_cuda else self._slots(held)
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
                f"cannot crop {remove} tokens: at most {can} came after the last move to the compressed middle, and "
                "after the last padding behind a token. "
                "Call cache.activate_past_recording() first; tokens then wait in the window until crop() is called"
            )
        if remove and self.eviction is not None:
            raise ValueError(
                f"cannot crop {remove} tokens: they have been counted in the attention by which this layer evicts; "
                "use a method without eviction while decoding"
            )
        self.seen -= remove
        self.seen_dev -= remove

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one (beam search, repeats, dropped rows)."""
        at, dev = rows.cpu().numpy(), rows.to(self.seen_dev.device)
        self.seen, self.start, self.floor = self.seen[at], self.start[at], self.floor[at]
        self.seen_dev, self.start_dev = self.seen_dev[dev], self.start_dev[dev]
        self.channels = self.channels.select(rows)
        self.values = None if self.values is None else self.values.select(rows)
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            setattr(self, name, getattr(self, name)[dev])
        self.prompt, self.tail = (part.select(rows, self.channels, self.values) for part in (self.prompt, self.tail))
        if self.eviction is not None:
            self.eviction.select(rows)
        self.version += 1  # first: what is read off the parts now is of the new version
        if self.reads is not None:
            self.reads.moved(self)

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`."""
        for name in ("sink_k", "sink_v", "ring_k", "ring_v", "seen_dev", "start_dev"):
            setattr(self, name, getattr(self, name).to(device))
        for table in (self.channels, self.values):
            if table is not None:
                table.index = table.index.to(device)
        for segment in (self.prompt, self.tail):
            segment.to(device)
        if self.eviction is not None:
            self.eviction.to(device)
        self.version += 1
        if self.reads is not None:
            self.reads.moved(self)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        names = ("sink_k", "sink_v", "ring_k", "ring_v", "seen_dev", "start_dev")
        middle = {f"{p}.{n}": t for p in ("prompt", "tail") for n, t in getattr(self, p).tensors().items()}
        more = {} if self.plan is None else {"plan": self.plan.table}
        if self.values is not None:
            more["values"] = self.values.index
        for name, part in (("eviction", self.eviction), ("reads", self.reads)):
            more |= {} if part is None else {f"{name}.{n}": t for n, t in part.tensors().items()}
        return {**{n: getattr(self, n) for n in names}, "channels": self.channels.index, **middle, **more}
