"""Attention over a compressed layer in plain PyTorch, all rows and heads at once.

A call takes a few dozen operations, however large the batch is.

The ragged middle is gathered into padded tensors for one call; only index tensors are kept between calls. Shapes:

    X = B H     KV heads of all rows
    R = G Q     query rows of one KV head: the queries of its first query head, then of the next
    N           padded tokens
    C           padded channels
"""

from __future__ import annotations

from typing import Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.storage.padded import Padded
from leank.eval.cache.storage.store import BackendPlan, Store
from leank.eval.cache.storage.upload import upload


def attend(
    store: Store,
    q: Tensor,
    position: Tensor,
    scaling: float,
    softmax: Softmax = PLAIN,
    layout: PartLayout | None = None,
) -> Tensor:
    """softmax(q K_sink, q_kept K_middle, q K_window) V (LeanK, section 3.3).

    A query sees sink and window up to its own index, and the tokens of the middle that the choice of reads shows. The
    weights go to the layer's eviction policy.

    q: [B, Hq, Q, D]
    position: [B, Q], the real index of each query, -1 for padding, whose output is zero
    scaling: factor of the logits
    layout: the present one of the store, None = it is made here
    Returns [B, Q, Hq, D] in q's dtype, computed in at least fp32.
    """
    layout, (batch, q_heads, new, dim) = layout or PartLayout(store), q.shape
    heads, wide = store.ring_k.shape[1], torch.promote_types(q.dtype, torch.float32)
    rows, at = q.reshape(batch * heads, -1, dim).to(wide), position.repeat(1, q_heads // heads)  # [X, R, D], [B, R]
    kept = layout.kept(rows)
    ends_k, ends_v = (
        torch.cat(both, 2).flatten(0, 1).to(wide)
        for both in ((store.sink_k, store.ring_k), (store.sink_v, store.ring_v))
    )
    unseen = (layout.ends[:, None] > at[:, :, None])[:, None]  # [B, 1, R, sink and slots]
    of_ends = softmax.cap(torch.bmm(rows, ends_k.mT) * scaling).unflatten(0, (batch, heads))
    logits = [of_ends.masked_fill(unseen, -torch.inf).flatten(0, 1)]
    if layout.parts:
        keys, hidden = [part.keys(wide) for part in layout.parts], layout.hidden
        if store.reads is not None:
            hidden = ~store.reads.sees(kept, keys, layout) | hidden
        of_middle = softmax.cap(torch.cat([torch.bmm(kept, k) for k in keys], -1) * scaling)
        logits.append(of_middle.masked_fill(hidden, -torch.inf))
    by_head = torch.cat(logits, -1).view(batch, q_heads, new, -1)
    weight = softmax.weights(by_head).masked_fill((position < 0)[:, None, :, None], 0).view(*rows.shape[:2], -1)
    of_ends, *of_parts = weight.split([ends_v.shape[1], *(part.columns for part in layout.parts)], -1)
    out = torch.bmm(of_ends, ends_v)
    for part, of_part in zip(layout.parts, of_parts, strict=True):
        out += part.weighted(of_part)
    if store.eviction is not None:
        store.eviction.add(layout.in_order(weight.sum(1)), store.held(), (position >= 0).any(1))
    return out.view(batch, q_heads, new, dim).transpose(1, 2).to(q.dtype)


class PartLayout:
    """Where the tokens of one store lie in the padded tensors; it is kept until a token moves.

    parts: those of prompt and tail that hold tokens
    ends: [B, sink + slots], the real index of the token in each place of the sink, then of the ring
    prompt, middle: [X, 1], tokens of the prompt's middle, and of the whole middle
    hidden: [X, 1, N] bool, the columns of the parts, side by side, that hold no token
    """

    def __init__(self, store: Store) -> None:
        self.state, self.segments = _state(store), (store.prompt, store.tail)
        self.parts = [Padded(segment) for segment in self.segments if segment.length.any()]
        self.sink, self.slots, device = store.sizes.sink, store.ring_k.shape[2], store.seen_dev.device
        start, slot = store.start_dev[:, None], torch.arange(self.slots, device=device)
        sink = torch.arange(self.sink, device=device).expand(len(start), -1)
        self.ends = torch.cat([sink, start + (slot - start) % self.slots], 1)
        self.prompt, self.middle = (
            upload(n.reshape(-1, 1), device) for n in (store.prompt.length, store.prompt.length + store.tail.length)
        )
        self.longest = int((store.prompt.length + store.tail.length).max())
        self.prompt_columns = self.parts[0].columns if store.prompt.length.any() else 0
        self._channels = None if store.channels.in_order else store.channels.columns().flatten(0, 1)
        empty = torch.empty(len(self.middle), 0, dtype=torch.bool, device=device)
        self.hidden = torch.cat([empty, *(part.hidden for part in self.parts)], 1)[:, None]
        self._order = None if store.middle.eviction is None else self._find_order(start)

    def kept(self, rows: Tensor) -> Tensor:
        """The kept channels of K, then zeros, [X, R, C], of x [X, R, D]."""
        if self._channels is None:
            return rows
        return pad(rows, (0, 1)).gather(-1, self._channels[:, None].expand(-1, rows.shape[1], -1))

    def column(self, token: Tensor) -> Tensor:
        """The column of each head's middle token [X or 1, n] in the parts side by side; the inverse of `token`."""
        return torch.where(token < self.prompt, token, token + (self.prompt_columns - self.prompt))

    def token(self) -> Tensor:
        """The middle token in each column, [X, N]; the inverse of `column`."""
        before = [self.prompt] * len(self.parts)
        if self.prompt_columns:
            before[0] = torch.zeros_like(self.prompt)
        column = torch.arange(max((part.columns for part in self.parts), default=0), device=self.prompt.device)
        return torch.cat([first + column[: p.columns] for first, p in zip(before, self.parts, strict=True)], 1)

    def _find_order(self, start: Tensor) -> Tensor:
        """The column in [ends | parts | one of zeros] of each head's tokens (sink, middle, window) in order, [X, n]."""
        first = start.repeat_interleave(len(self.middle) // len(start), 0)
        token = torch.arange(self.sink + self.longest + self.slots, device=start.device)
        of_middle, of_window = token - self.sink, token - self.sink - self.middle
        ends, zeros = self.sink + self.slots, self.sink + self.slots + self.hidden.shape[-1]
        window = torch.where(of_window < self.slots, self.sink + (first + of_window) % self.slots, zeros)
        order = torch.where(of_window < 0, ends + self.column(of_middle), window)
        return torch.where(token < self.sink, token, order)

    def in_order(self, weights: Tensor) -> Tensor:
        """Weights [X, ends and parts] sorted by each head's tokens, [X, n]; zero past its last token."""
        assert self._order is not None
        return pad(weights, (0, 1)).gather(1, self._order)

    @property
    def table(self) -> Tensor:
        """All tensors of the layout as one tensor of bytes, so that memory counts them."""
        parts = [x for part in self.parts for x in vars(part).values()]
        kept = [x for x in (*vars(self).values(), *parts) if isinstance(x, Tensor)]
        return torch.cat([x.reshape(-1).view(torch.uint8) for x in kept])


Kept = TypeVar("Kept")


class Plans(WeakKeyDictionary[Store, Kept]):
    """What a backend has derived from each store, and keeps as long as the store lives.

    A copy is empty: a plan holds addresses, and a copied store, which lies elsewhere, gets a plan of its own.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()


def _state(store: Store) -> tuple[object, ...]:
    """The values, besides the segments themselves, that a layout depends on."""
    counts = (store.start, store.prompt.length, store.tail.length)
    return store.version, store.seen_dev.device, *(n.tobytes() for n in counts)


class Plain:
    """The backend in plain PyTorch, for any device and dtype; as a choice it chooses itself.

    `launch.Kernel` overrides what Triton does faster, and its tests hold it equal to this.
    """

    captures = False

    def __init__(self) -> None:
        self.layouts = Plans[PartLayout]()

    def choose(self, store: Store, q: Tensor, softmax: Softmax = PLAIN) -> Plain:
        """The backend for a layer that queries like q [B, Hq, Q, D] read; called when its first query comes."""
        return self

    def attend(self, store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
        """Attention over the layer; the parameters are those of `attend` above."""
        return attend(store, q, position, scaling, softmax, self._layout(store))

    def write(self, store: Store, k: Tensor, v: Tensor) -> Tensor:
        """Put new tokens into the ring."""
        return store.write(k, v)

    def move(self, store: Store, due: np.ndarray) -> None:
        """Move tokens from the window to the middle."""
        store.move(due)
        self._forget_outdated(store)

    def evict(self, store: Store) -> None:
        """Drop tokens of the middle that the layer's policy gives up."""
        store.evict()
        self._forget_outdated(store)

    def prepare(self, store: Store) -> object:
        """Bring what depends on addresses and capacities up to date; nothing does here."""
        return None

    def plan(self, store: Store) -> BackendPlan | None:
        """What it has derived from the store's addresses and capacities, None = nothing yet."""
        return self.layouts.get(store)

    def adopt(self, store: Store, plan: BackendPlan | None) -> None:
        """Take over the plan of an earlier store, at whose addresses this one lies now."""

    def tensors(self) -> dict[str, Tensor]:
        """Scratch memory that the layers share, by name."""
        return {}

    def _layout(self, store: Store) -> PartLayout:
        layout = self.layouts.get(store)
        if layout is None or layout.segments != (store.prompt, store.tail) or layout.state != _state(store):
            layout = self.layouts[store] = PartLayout(store)
        return layout

    def _forget_outdated(self, store: Store) -> None:
        """Drop a layout of segments that the store has replaced: it would hold their memory until the next step."""
        layout = self.layouts.get(store)
        if layout is not None and layout.segments != (store.prompt, store.tail):
            del self.layouts[store]
