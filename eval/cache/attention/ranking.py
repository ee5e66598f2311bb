"""How the kernels rank the middle, and the table that says where they find it.

Single tokens are ranked by their label channels, pages by the bounds of their keys.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.attention.batched import PartLayout
from leank.eval.cache.attention.schedule import offset
from leank.eval.cache.storage.store import Store
from leank.eval.cache.storage.upload import upload


class Bounds:
    """The smallest and largest key of every page of a middle, per row and KV head (Quest, Algorithm 1).

    page: tokens of a page
    flat: the bounds of one head after the other, each [pages that there is room for, 2, kept channels]
    first, room: [B, H], first element of each head's region, and pages that it has room for
    pages, channels: [B, H], pages that hold tokens, and kept channels
    table: [3, X, 1, 1], first, pages and channels on the device
    """

    def __init__(self, store: Store, page: int) -> None:
        self.page = page
        self._of: tuple[object, ...] | None = None
        self._at: tuple[Tensor, Tensor] | None = None  # of `_places`, once they are asked for
        self.update(store)

    def update(self, store: Store) -> None:
        """Bounds of the middle as it is now; the last page may be partly filled. Nothing happens if they are these."""
        if self.current(store):
            return
        layout, device = PartLayout(store), store.seen_dev.device
        self._make_room(store, store.prompt.length + store.tail.length)
        if not layout.parts:
            return
        dtype = store.ring_k.dtype
        keys = torch.cat([part.keys(dtype) for part in layout.parts], -1)  # [X, C, N]
        token = torch.arange(int(self.pages.max()) * self.page, device=device)
        filled = layout.column(torch.minimum(token, layout.middle - 1).clamp(min=0))  # past the end the last again,
        filled = filled.clamp(max=keys.shape[-1] - 1)  # anything in heads without a middle
        pages = keys.gather(-1, filled[:, None].expand(-1, keys.shape[1], -1)).unflatten(-1, (-1, self.page))
        both = torch.stack([pages.amin(-1), pages.amax(-1)], 1).permute(0, 3, 1, 2)  # [X, pages, 2, C]
        page, channel = (torch.arange(n, device=device) for n in (both.shape[1], both.shape[3]))
        there = (page[:, None, None] < self.table[1, :, None]) & (channel < self.table[2, :, None])
        self.flat = both[there.expand_as(both)]

    def widen(self, store: Store, tokens: np.ndarray) -> bool:
        """Make room for the bounds of `tokens` [B, H] of the middle unless there is; then all must be computed anew."""
        short = bool((-(-tokens // self.page) > self.room).any())
        if short:
            self._make_room(store, tokens)
        return short

    def _make_room(self, store: Store, tokens: np.ndarray) -> None:
        self.room, self.channels = -(-tokens // self.page), store.channels.count
        size = (2 * self.room * self.channels).reshape(-1)
        self.first = (np.cumsum(size) - size).reshape(tokens.shape)
        self.flat = store.ring_k.new_empty(int(size.sum()))
        self.settle(store)

    def settle(self, store: Store) -> None:
        """Note that these are the bounds of the middle as it is now."""
        self._of, self._at = self._state(store), None
        self.pages = -(-(store.prompt.length + store.tail.length) // self.page)
        of_heads = np.stack([x.reshape(-1, 1, 1) for x in (self.first, self.pages, self.channels)])
        self.table = upload(of_heads, store.seen_dev.device)

    def current(self, store: Store) -> bool:
        """Whether these are the bounds of the middle as it is now."""
        return self._of is not None and all(a is b or a == b for a, b in zip(self._of, self._state(store), strict=True))

    def _state(self, store: Store) -> tuple[object, ...]:
        lengths = (store.prompt.length.tobytes(), store.tail.length.tobytes())
        return store.prompt, store.prompt.k.data_ptr(), *lengths

    def highest(self, q: Tensor) -> Tensor:
        """The highest product sum_c max(q_c min_c, q_c max_c) of each page, [X, R, pages], with q [X, R, C]."""
        if self._at is None:
            self._at = self._places()
        at, past = self._at
        low, high = self.flat[at].to(q.dtype).mT  # [X, C, pages] each
        bound = torch.baddbmm(torch.bmm(q.clamp(min=0), high), q.clamp(max=0), low)  # what the larger products add to
        return bound.masked_fill(past, -torch.inf)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where each page's and channel's bounds are, [2, X, pages, C], and which pages hold none, [X, 1, pages]."""
        first, pages, channels = self.table
        channel, page = (torch.arange(int(n.max()), device=first.device) for n in (self.channels, self.pages))
        of_channel, of_page = torch.where(channel < channels, channel, 0), torch.where(page < pages, page, 0)
        low = first + 2 * of_page.mT * channels + of_channel  # [X, pages, C]
        return torch.stack([low, low + channels]).clamp(max=self.flat.numel() - 1), page >= pages

    def tensors(self) -> dict[str, Tensor]:
        """All bounds, and where each head's are."""
        places = {} if self._at is None else dict(zip(("places", "past"), self._at, strict=True))
        return {"bounds": self.flat, "table": self.table, **places}


@dataclass(frozen=True)
class Ranking:
    """How a layer ranks its middle for each query head, and how much of it a step reads."""

    most: int  # pages, or tokens, that a query head reads at most
    # of the pages, which are ranked by them; None = tokens are ranked, by their label channels, which are stored before
    # the others
    bounds: Bounds | None = None
    bits: int = 16  # that labels are rounded to, 16 = they are not

    @property
    def page(self) -> int:
        """Tokens that are chosen together."""
        return 1 if self.bounds is None else self.bounds.page


class Column(IntEnum):
    """Columns of the table, a line per row and KV head; offsets count from the ring, scores' in four bytes."""

    PROMPT_K = 0
    PROMPT_V = 1
    TAIL_K = 2
    TAIL_V = 3
    PROMPT = 4  # tokens of the prompt's middle
    CHANNELS = 5  # channels of K
    LABELS = 6  # the first of them, by which tokens are ranked
    BOUNDS = 7
    SCORES = 8  # of the head's first query head
    STRIDE = 9  # from one query head's scores to the next one's
    BEST = 10  # of each run of tokens, of the head's first query head
    BEST_STRIDE = 11
    SINK_K = 12
    SINK_V = 13
    RING_K = 14
    RING_V = 15


FIELDS = len(Column)


def places(store: Store, ranking: Ranking, scores: Tensor, room: int, runs: int, group: int) -> np.ndarray:
    """The table's content, [B H, FIELDS] int64; scores: float32, [B Hq, room] of pages or tokens, then [B Hq, runs]."""
    base, prompt, tail = store.ring_k, store.prompt, store.tail
    heads = prompt.length.size
    number, dim = np.arange(heads), base.shape[-1]
    sink, ring = number * store.sizes.sink * dim, number * base.shape[2] * dim
    first = 0 if store.channels.first is None else store.channels.first
    bounds = 0 if ranking.bounds is None else offset(base, ranking.bounds.flat) + ranking.bounds.first
    of_scores = offset(base, scores)
    columns = {
        Column.PROMPT_K: offset(base, prompt.k) + prompt.k_start,
        Column.PROMPT_V: offset(base, prompt.v) + prompt.v_start,
        Column.TAIL_K: offset(base, tail.k) + tail.k_start,
        Column.TAIL_V: offset(base, tail.v) + tail.v_start,
        Column.PROMPT: prompt.length,
        Column.CHANNELS: store.channels.count,
        Column.LABELS: first,
        Column.BOUNDS: bounds,
        Column.SCORES: of_scores + number * group * room,
        Column.STRIDE: room,
        Column.BEST: of_scores + heads * group * room + number * group * runs,
        Column.BEST_STRIDE: runs,
        Column.SINK_K: offset(base, store.sink_k) + sink,
        Column.SINK_V: offset(base, store.sink_v) + sink,
        Column.RING_K: ring,
        Column.RING_V: offset(base, store.ring_v) + ring,
    }
    table = np.zeros((heads, FIELDS), dtype=np.int64)
    for column, values in columns.items():
        table[:, column] = np.asarray(values).reshape(-1)
    return table
