"""Attention over a sealed layer in plain PyTorch, all rows and heads at once: a few dozen operations, however large the
batch is. `reference.attend` is the same, head by head.

The ragged middle is gathered into padded tensors for the time of one call; what stays is index tensors. Shapes: X = B H
KV heads of all rows; R = G Q rows of queries of one, a query head after the other; N padded tokens; C padded channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.cache.attention.softmax import PLAIN, Softmax
from eval.cache.storage.channels import KeptChannels
from eval.cache.storage.pages import PAGE, Segment, lines, round_up
from eval.cache.storage.quantised import QuantisedSegment
from eval.cache.storage.upload import upload

if TYPE_CHECKING:
    from eval.cache.storage.store import Store


def attend(store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
    """As `reference.attend`."""
    layout, (batch, q_heads, new, dim) = layout_of(store), q.shape
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
        store.eviction.add(layout.in_order(weight.sum(1)), layout.held(store))
    return out.view(batch, q_heads, new, dim).transpose(1, 2).to(q.dtype)


class PartLayout:
    """Where the tokens of one store are in the padded tensors, kept until one moves.

    parts: of prompt and tail those that hold tokens. ends [B, sink + slots]: the real index of what lies in the sink,
    then in each slot of the ring. middle [X, 1]: tokens of the middle; hidden [X, 1, N]: columns of the parts, side by
    side, that hold none.
    """

    def __init__(self, store: Store):
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
        whole = (store.channels.count == store.channels.index.shape[-1]).all()
        self._channels = None if whole else _channels(store.channels)
        empty = torch.empty(len(self.middle), 0, dtype=torch.bool, device=device)
        self.hidden = torch.cat([empty, *(part.hidden for part in self.parts)], 1)[:, None]
        self._order = None if store.middle.eviction is None else self._find_order(start)

    def kept(self, rows: Tensor) -> Tensor:
        """Of x [X, R, D] the kept channels of K, [X, R, C], then zeros."""
        if self._channels is None:
            return rows
        return pad(rows, (0, 1)).gather(-1, self._channels[:, None].expand(-1, rows.shape[1], -1))

    def column(self, token: Tensor) -> Tensor:
        """The column in the parts, side by side, of each head's middle token [X or 1, n], counted from the prompt's
        first."""
        return torch.where(token < self.prompt, token, token + (self.prompt_columns - self.prompt))

    def token(self) -> Tensor:
        """The inverse of `column`: [X, N]."""
        before = [self.prompt] * len(self.parts)
        if self.prompt_columns:
            before[0] = torch.zeros_like(self.prompt)
        column = torch.arange(max((part.columns for part in self.parts), default=0), device=self.prompt.device)
        return torch.cat([first + column[: p.columns] for first, p in zip(before, self.parts, strict=True)], 1)

    def _find_order(self, start: Tensor) -> Tensor:
        """Of each head's tokens in order (sink, middle, window) the column in [ends | parts | one of zeros], [X, n]."""
        first = start.repeat_interleave(len(self.middle) // len(start), 0)
        token = torch.arange(self.sink + self.longest + self.slots, device=start.device)
        of_middle, of_window = token - self.sink, token - self.sink - self.middle
        ends, zeros = self.sink + self.slots, self.sink + self.slots + self.hidden.shape[-1]
        window = torch.where(of_window < self.slots, self.sink + (first + of_window) % self.slots, zeros)
        order = torch.where(of_window < 0, ends + self.column(of_middle), window)
        return torch.where(token < self.sink, token, order)

    def in_order(self, weights: Tensor) -> Tensor:
        """Weights [X, ends and parts] of each head's tokens in order, [X, n]; zero where it has no more tokens."""
        assert self._order is not None
        return pad(weights, (0, 1)).gather(1, self._order)

    def held(self, store: Store) -> np.ndarray:
        """Tokens of each row and head [B, H]: sink, middle and window."""
        ends = np.minimum(store.seen, self.sink) + np.maximum(0, store.seen - store.start)
        return ends[:, None] + store.prompt.length + store.tail.length

    @property
    def table(self) -> Tensor:
        """All that is kept, as bytes, for `Store.tensors`."""
        parts = [x for part in self.parts for x in vars(part).values()]
        kept = [x for x in (*vars(self).values(), *parts) if isinstance(x, Tensor)]
        return torch.cat([x.reshape(-1).view(torch.uint8) for x in kept])


def layout_of(store: Store) -> PartLayout:
    """The store's layout as it is now, kept as its plan."""
    plan = store.plan
    fits = isinstance(plan, PartLayout) and plan.segments == (store.prompt, store.tail) and plan.state == _state(store)
    if not fits:
        store.plan = PartLayout(store)
    return store.plan


def _state(store: Store) -> tuple[Any, ...]:
    """What a layout depends on, besides the segments themselves."""
    counts = (store.start, store.prompt.length, store.tail.length)
    return store.version, store.seen_dev.device, *(n.tobytes() for n in counts)


def _channels(table: KeptChannels) -> Tensor:
    """Kept channels of every head, then D: [X, C] int64."""
    dim = table.index.shape[-1]
    count = upload(table.count.reshape(-1, 1), table.index.device)
    index = table.index.reshape(-1, dim)[:, : int(table.count.max())].long()
    return torch.where(torch.arange(index.shape[1], device=index.device) < count, index, dim)


class Padded:
    """A segment that holds tokens, as padded tensors; columns: N, whole pages. hidden [X, N]: columns without a token.

    What is gathered there is finite, so that its weight of zero makes it nothing, or it is hidden: of K a head's first
    channel stands for those that it lacks (queries are zero there), of V another token for those that it lacks.
    """

    def __init__(self, segment: Segment):
        self.segment, device = segment, segment.k.device
        (_, k_start, _, self._k_line), (_, v_start, _, self._v_line) = segment._parts()
        if segment.values is not None:  # tokens lie at any number, not at whole lines
            self._v_line = 1
        holds = segment.length > 0
        starts = (k_start // self._k_line, segment.channels.count, v_start // self._v_line, segment.width)
        of_heads = np.stack([np.where(holds, n, 0).reshape(-1) for n in (segment.length, *starts)])
        length, first, count, v_first, width = upload(of_heads, device)[..., None]  # each [X, 1]
        self.columns = round_up(int(segment.length.max()), PAGE)
        token, page, channel = (
            torch.arange(n, device=device)
            for n in (self.columns, self.columns // PAGE, int(segment.channels.count.max()))
        )
        self.hidden = token >= length
        page, channel = torch.where(page * PAGE < length, page, 0), torch.where(channel < count, channel, 0)
        self._keys = (first[..., None] + page[:, None] * count[..., None] + channel[..., None]).int()  # [X, C, pages]
        some = v_start[holds & (segment.width > 0)] // self._v_line
        self._some = int(some[0]) if len(some) else 0
        tokens = token if segment.values is None else token * width
        values = torch.where(self.hidden, self._some, v_first + tokens)  # [X, N]
        self._values = values.int() if segment.values is None else values  # single numbers may be too many for int32
        self._channels = None if segment.values is None else _channels(segment.values)
        self._width = width

    def _numbers(self, of: Tensor, line: int, index: Tensor) -> Tensor:
        """Lines `index` [n] of a flat tensor, as numbers [n, numbers]."""
        found, segment = lines(of, line).index_select(0, index), self.segment
        if not isinstance(segment, QuantisedSegment):
            return found
        cells = found.unflatten(-1, (-1, segment.packing.cell(segment.dtype)))
        return segment.packing.unpack(cells, segment.dtype).flatten(-2)

    def keys(self, dtype: torch.dtype) -> Tensor:
        """K, channel-major: [X, C, N]."""
        heads, channels, _ = self._keys.shape
        return self._numbers(self.segment.k, self._k_line, self._keys.flatten()).to(dtype).view(heads, channels, -1)

    def _kept_values(self, dtype: torch.dtype) -> Tensor:
        """V [X, N, kept channels], which are all D where none are pruned."""
        heads, columns = self._values.shape
        if self._channels is None:
            found = self._numbers(self.segment.v, self._v_line, self._values.flatten())
            return found.to(dtype).view(heads, columns, -1)
        rank = torch.arange(self._channels.shape[1], device=self._values.device)
        there = (rank < self._width)[:, None] & ~self.hidden[..., None]
        return self.segment.v[torch.where(there, self._values[..., None] + rank, self._some)].to(dtype)

    def weighted(self, weight: Tensor) -> Tensor:
        """weight V: [X, R, D] of weights [X, R, N]."""
        return self._whole(torch.bmm(weight, self._kept_values(weight.dtype)), self._channels)

    def _whole(self, x: Tensor, channels: Tensor | None) -> Tensor:
        """x [X, n, C] of the kept channels [X, C] with zeros in the others: [X, n, D]."""
        if channels is None:
            return x
        whole = x.new_zeros(*x.shape[:2], self.segment.head_dim + 1)  # what a head lacks goes to the last
        return whole.scatter_(-1, channels[:, None].expand_as(x), x)[..., :-1]

    def dense(self) -> tuple[Tensor, Tensor]:
        """K and V as they were appended, [B, H, N, D], zero in pruned channels; hidden columns hold anything."""
        segment = self.segment
        k = self._whole(self.keys(segment.dtype).mT, _channels(segment.channels))
        v = self._whole(self._kept_values(segment.dtype), self._channels)
        return k.unflatten(0, segment.length.shape), v.unflatten(0, segment.length.shape)


def compacted(segment: Segment, stay: Tensor) -> Segment:
    """A copy of only the tokens that stay, with no more room than they need: stay [B, H, n] bool, n at least the tokens
    that any head holds, False beyond a head's own."""
    count = stay.sum(-1).cpu().numpy()
    new = segment.fresh(segment.channels, count, segment.values)
    if count.any():
        first = torch.argsort((~stay).to(torch.uint8), dim=-1, stable=True)[..., : int(count.max()), None]
        k, v = (x.gather(2, first.expand(-1, -1, -1, segment.head_dim)) for x in Padded(segment).dense())
        new.append(np.arange(len(count)), k, v, count)
    return new
