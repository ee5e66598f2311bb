"""What a sealed layer holds: sink | middle | window, per row and in real tokens (LeanK, section 3.3).

A row's real tokens are numbered 0, 1, ... whatever its padding. The first `sink` tokens stay in the sink. The last ones
are in the window, a ring in which token i has slot i mod slots. The tokens between are in the middle. The window holds
`window` tokens after the prompt and up to `window + flush` while decoding; when it holds that many, its oldest `flush`
tokens move to the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leank.data_gen.amount import amount
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.pages import PAGE, Extent, round_up
from leank.eval.cache.storage.ring import resized, write_columns, write_prompt
from leank.eval.cache.storage.sealing import begin_eviction, padded_left_only, seal_middle
from leank.eval.cache.storage.sizes import Sizes, middle_columns, real_positions
from leank.eval.cache.storage.upload import capturing, update, upload

Write = Callable[["Store", Tensor, Tensor], Tensor]
Move = Callable[["Store", np.ndarray], None]
Evict = Callable[["Store"], None]
GROWTH = 128  # tokens: a growing middle takes this much slack, or 1/16 of its length if that is more


class BackendPlan(Protocol):
    """What a backend derives from a store and keeps until the store's addresses or capacities change."""

    @property
    def table(self) -> Tensor:
        """What the plan holds on the device."""


class Store:
    """The three parts of one layer for a batch of B rows.

    seen, start: [B] on the host, real tokens, and the first of them in the window
    floor: [B] on the host, the length below which `crop` cannot go
    seen_dev, start_dev: [B] int64, seen and start on the device
    sink_k, sink_v, ring_k, ring_v: [B, H, sink or slots, D]; the ring holds the window
    prompt, tail: the middle: the prompt's share in exactly the room that it needs, then what decoding adds; where
        tokens leave (and every head takes new ones), all is in the tail, whose length is read on the device
    channels, values: kept channels of the middle's K and V; values None = all
    quiet: lower bound on the tokens that can arrive before the next flush moves any
    version: grows when addresses or capacities change, so that a backend's plan can follow
    plan: what the backend keeps for this store
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
        """Seal a prompt k, v [B, H, T, D].

        real: [B, T] bool, False = padding, None = no padding
        tokens: [B, H, T] bool, the tokens of the middle that stay, None = all; sink and window always stay
        scores: [B, H, T], the attention that each token has received, where the middle evicts; None = zeros
        """
        self.sizes, self.middle = sizes, middle
        self.quiet, self.version = 0, 0
        self.plan: BackendPlan | None = None
        self.channels = KeptChannels.of(middle.channels, k, middle.labels)
        self.values = None if middle.values is None else KeptChannels.of(middle.values, v)
        self._count(k, real)
        position = real_positions(torch.zeros_like(self.seen_dev), k.shape[2], real)
        self._fill_ends(k, v, None if real is None else position)
        in_middle = middle_columns(position, sizes)
        chosen = None if tokens is None else in_middle[:, None] & tokens.to(k.device)  # [B, H, T]
        self._fill_middle(k, v, None if real is None else in_middle, chosen)
        self.eviction = None
        if middle.eviction is not None:
            has_middle = self.channels.count > 0
            self.eviction = begin_eviction(middle.eviction, has_middle, position, in_middle, chosen, scores)
            self.evict()
        self.reads = None if middle.reads is None else middle.reads.start(self)

    def _count(self, k: Tensor, real: Tensor | None) -> None:
        """Count the prompt's real tokens, and those before the window."""
        self.seen = np.full(len(k), k.shape[2]) if real is None else real.sum(-1).cpu().numpy()
        self.start = np.maximum(self.sizes.sink, self.seen - self.sizes.window)
        whole = self.start <= self.sizes.sink  # rows of which nothing goes to the middle
        self.floor = np.where(whole & padded_left_only(real, len(k)), 0, self.seen)
        self.seen_dev, self.start_dev = (upload(a, k.device) for a in (self.seen, self.start))

    def _fill_ends(self, k: Tensor, v: Tensor, position: Tensor | None) -> None:
        """Make sink and window and fill them; position [B, T] of a padded prompt, None = no padding."""
        batch, heads, _, dim = k.shape
        slots = self._slots(int(self.ends()[1].max()))
        self.sink_k, self.sink_v = (k.new_zeros(batch, heads, self.sizes.sink, dim) for _ in range(2))
        self.ring_k, self.ring_v = (k.new_zeros(batch, heads, slots, dim) for _ in range(2))
        if position is not None:
            self._write(k, v, position)
            return
        write_prompt(self.sink_k, self.ring_k, k, int(self.start[0]))
        write_prompt(self.sink_v, self.ring_v, v, int(self.start[0]))

    def _fill_middle(self, k: Tensor, v: Tensor, in_middle: Tensor | None, chosen: Tensor | None) -> None:
        """Make both parts of the middle, and fill one with the columns of the prompt that stay."""
        of_rows = (self.start - self.sizes.sink)[:, None].repeat(k.shape[1], 1)
        moved = of_rows if chosen is None else chosen.sum(-1).cpu().numpy()
        parts = [
            self.middle.segment(Extent(self.channels, capacity, k.shape[-1], k.dtype, self.values))
            for capacity in (moved, np.zeros_like(moved))
        ]
        filled, empty = parts
        in_tail = self.middle.eviction is not None and self.middle.joins is None  # room in the tail is what joins
        self.prompt, self.tail = (empty, filled) if in_tail else parts
        seal_middle(filled, k, v, moved, slice(self.sizes.sink, int(self.start[0])), in_middle, chosen)

    def _write(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Put columns of real index [start, ...) into the ring and [0, sink) into the sink."""
        write_columns(self.sink_k, self.ring_k, k, position, self.start_dev)
        write_columns(self.sink_v, self.ring_v, v, position, self.start_dev)

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None, write: Write | None = None) -> Tensor:
        """Take in new tokens.

        k, v: [B, H, n, D]
        real: [B, n] bool, False = padding, None = no padding
        write: puts tokens that all belong into the ring, and counts them on the device; None = `Store.write`

        Returns their real indices [B, n], -1 for padding.
        """
        new, self.quiet = k.shape[2], 0
        self.fit(new)
        if real is None and (self.seen >= self.sizes.sink).all():  # every decoding step; no wait for the device
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
        """Put new tokens k, v [B, H, n, D] into the ring, and count them on the device.

        Returns their real indices [B, n].
        """
        position = real_positions(self.seen_dev, k.shape[2], None)
        row, slot = torch.arange(len(k), device=k.device)[:, None], position % self.ring_k.shape[2]
        self.ring_k[row, :, slot] = k.transpose(1, 2)
        self.ring_v[row, :, slot] = v.transpose(1, 2)
        self.seen_dev += k.shape[2]
        return position

    def flush(self, move: Move | None = None, evict: Evict | None = None) -> None:
        """Move what is due from the window to the middle: `flush` tokens each time it holds `window + flush`.

        move: puts `due` [B] tokens of each row into a tail that has room, None = `Store.move`
        evict: drops tokens of the middle that the policy gives up, None = `Store.evict`
        """
        size = self.sizes
        due = np.maximum(0, self.seen - self.start - size.window) // size.flush * size.flush
        if due.any():
            self._grow(due)
            (move or Store.move)(self, due)
            if self.eviction is not None:
                first = self.ends()[0][:, None] + self.prompt.length + self.tail.length
                self.eviction.forget_moved(due[:, None] * ~self.middle.joining(self.channels), first)
            self.start = self.start + due
            self.floor = np.where(due > 0, self.seen, self.floor)
            if self.reads is not None:
                self.reads.moved(self)
        if self.eviction is not None:
            (evict or Store.evict)(self)
        self.fit(0)
        self.quiet = size.window + size.flush - int((self.seen - self.start).max())
        if self.eviction is not None:
            self.quiet = min(self.quiet, self.eviction.quiet(self.held()))

    def move(self, due: np.ndarray) -> None:
        """Put the oldest `due` [B] tokens of each row's window into the tail, and count them there and in start_dev."""
        for count in np.unique(due[due > 0]).tolist():
            rows = np.nonzero(due == count)[0]
            rows_dev = upload(rows, self.seen_dev.device)
            index = self.start_dev[rows_dev, None] + torch.arange(count, device=self.seen_dev.device)
            slot = index % self.ring_k.shape[2]
            k, v = (x[rows_dev[:, None], :, slot].transpose(1, 2) for x in (self.ring_k, self.ring_v))
            self.tail.append(rows, k, v)
        update(self.start_dev, self.start + due)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that each row holds in the sink [B], and in the window [B]."""
        return np.minimum(self.seen, self.sizes.sink), np.maximum(0, self.seen - self.start)

    def held(self) -> np.ndarray:
        """Tokens that each row and head holds [B, H]: sink, middle and window."""
        return np.add(*self.ends())[:, None] + self.prompt.length + self.tail.length

    def _grow(self, due: np.ndarray) -> None:
        """Give the tail room for `due` [B] more tokens and for some later ones, unless it has that room."""
        joins, tail = self.middle.joining(self.channels), self.tail
        if (tail.length + due[:, None] * joins > tail.capacity).any():
            need = tail.length + due.max() * joins
            slack = np.maximum(GROWTH, need // 16)
            self.tail = tail.grown(np.maximum(tail.capacity, np.where(need > 0, need + slack, 0)))
            self.version += 1

    def evict(self) -> None:
        """Drop the tokens of the middle that the policy gives up."""
        pruned = None if self.eviction is None else self.eviction.prune(self.prompt, self.tail, *self.ends())
        if pruned is not None:
            self.prompt, self.tail = pruned
            self.version += 1

    def _slots(self, held: int) -> int:
        """Slots of a ring that holds `held` tokens: no spare page before there is a middle, then the usual size."""
        needed = round_up(max(1, held), PAGE)
        return needed if (self.start <= self.sizes.sink).all() else max(self.sizes.ring, needed)

    def fit(self, new: int) -> None:
        """Grow the ring for `new` more tokens in every row, or give it its usual size back."""
        held, old = int(self.ends()[1].max()) + new, self.ring_k.shape[2]
        # On a GPU a captured step may follow, and it cannot grow the ring: decoding begins with all of it.
        slots = max(self.sizes.ring, round_up(held, PAGE)) if self.ring_k.is_cuda else self._slots(held)
        if slots == old or (slots < old and new):
            return
        self.ring_k, self.ring_v = (resized(ring, self.start_dev, held, slots) for ring in (self.ring_k, self.ring_v))
        self.version += 1

    def crop(self, remove: int) -> None:
        """Forget the last `remove` tokens of every row.

        Raises ValueError if tokens would be needed that have been compressed or counted in eviction scores.
        """
        if (self.seen - remove < self.floor).any():
            can = int((self.seen - self.floor).min())
            raise ValueError(
                f"cannot crop {amount(remove, 'token')}: at most {can} came after the last move to the middle, and "
                "after the last padding behind a token. With cache.activate_past_recording() tokens wait until crop()"
            )
        if remove and self.eviction is not None:
            raise ValueError(
                f"cannot crop {amount(remove, 'token')}, which counted in the attention by which this layer evicts; "
                "use a method without eviction while decoding"
            )
        self.seen -= remove
        self.seen_dev -= remove

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one, for beam search, repeated rows and dropped rows."""
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
        self.version += 1  # before `moved`, whose layout then belongs to the new version
        if self.reads is not None:
            self.reads.moved(self)

    def to(self, device: torch.device) -> None:
        """Move everything held to `device`, unless it is there."""
        if self.ring_k.device == device:
            return
        for name in ("sink_k", "sink_v", "ring_k", "ring_v", "seen_dev", "start_dev"):
            setattr(self, name, getattr(self, name).to(device))
        for table in (self.channels, self.values):
            if table is not None:
                table.to(device)
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
            more |= {f"values.{n}": t for n, t in self.values.tensors().items()}
        for name, part in (("eviction", self.eviction), ("reads", self.reads)):
            more |= {} if part is None else {f"{name}.{n}": t for n, t in part.tensors().items()}
        return {**{n: getattr(self, n) for n in names}, "channels": self.channels.index, **middle, **more}
