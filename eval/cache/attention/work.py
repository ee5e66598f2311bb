"""The table of work that lets one launch read a whole ragged layer with every program moving the same number of bytes.

A *unit* is one part (sink, prompt's middle, decoded middle, window) of one row and KV head. Units follow each other
row by row, head by head; the line of all their bytes is cut into equal spans, one per program, at tile boundaries. A
*piece* is what a program reads of one unit. The pieces that a program reads of one (row, head) form one partial
result; the last program to finish a (row, head) merges them.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from eval.cache.storage.store import Store

SINK, WINDOW, PROMPT, TAIL = range(4)
STORAGE_PARTS = 4
# One line of the table, int64: part; row; KV head; first and last token of the piece (slots of the part, last
# excluded); first element of K and of V, counted from the ring's; channels; 1 = first piece of a partial result; how
# many partial results this (row, head) has if this piece ends one, else 0; number of the partial result; number of the
# (row, head)'s first one; next line, -1 = none
FIELDS = 13
PIECE_BYTES = 16384  # what starting a piece costs, as bytes that could have been read meanwhile


def _elements_from(base: Tensor, tensor: Tensor) -> int:
    """Where `tensor` begins, in its elements counted from `base`: the kernel reads all parts through one pointer."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def units(store: Store) -> np.ndarray:
    """[U, 7] int64: part, row, head, tokens, first K element, first V element, channels; in the order they are read."""
    base = store.ring_k
    batch, heads, _, dim = base.shape
    row, head = np.divmod(np.arange(batch * heads), heads)
    parts = []

    def add(part: int, tokens: np.ndarray, k_start: np.ndarray, v_start: np.ndarray, channels: np.ndarray) -> None:
        order = np.arange(batch * heads) * 4 + (SINK, PROMPT, TAIL, WINDOW).index(part)
        columns = (order, np.full_like(order, part), row, head, tokens, k_start, v_start, channels)
        parts.append(np.stack([np.broadcast_to(np.asarray(c).reshape(-1), order.shape) for c in columns], 1))

    number, all_channels = np.arange(batch * heads), np.full(1, dim)
    for part, k, v in ((SINK, store.sink_k, store.sink_v), (WINDOW, store.ring_k, store.ring_v)):
        start = number * k.shape[2] * dim
        add(
            part, np.full(1, k.shape[2]), _elements_from(base, k) + start, _elements_from(base, v) + start, all_channels
        )
    for part, segment in ((PROMPT, store.prompt), (TAIL, store.tail)):
        tokens = segment.length if part == PROMPT else segment.capacity
        k_start, v_start = _elements_from(base, segment.k), _elements_from(base, segment.v)
        add(part, tokens, k_start + segment.k_start, v_start + segment.v_start, segment.channels.count)
    table = np.concatenate(parts)
    table = table[table[:, 4] > 0]
    return table[np.argsort(table[:, 0], kind="stable"), 1:]


def cut(unit: np.ndarray, programs: int, tile: int, head_dim: int, share: float = 1.0) -> np.ndarray:
    """Cut the units into equal spans: table [>= programs, FIELDS] int64.

    Program p starts at line p; an idle program's line is an empty piece of the first row's sink. share: bytes that a
    number of the middle takes, over those of one in sink and window.
    """
    part, row, head, tokens, k_start, v_start, channels = unit.T
    tiles = -(-tokens // tile)
    weight = (channels + head_dim) * tile * 2 * np.where(part < PROMPT, 1, share)
    cost = tiles * weight + PIECE_BYTES
    begin = np.cumsum(cost) - cost
    line = np.cumsum(tiles) - tiles  # first tile of each unit on the line of all tiles
    total = int(tiles.sum())

    goal = np.arange(1, programs) * (cost.sum() / programs)
    at = np.searchsorted(begin, goal, side="right") - 1
    into = np.clip(np.rint((goal - begin[at]) / weight[at]), 0, tiles[at]).astype(np.int64)
    bounds = np.maximum.accumulate(line[at] + into)
    cuts = np.unique(np.concatenate([line, bounds[bounds < total]]))
    u = np.searchsorted(line, cuts, side="right") - 1
    program = np.searchsorted(bounds, cuts, side="right")
    first = (cuts - line[u]) * tile
    last = np.minimum((np.append(cuts[1:], total) - line[u]) * tile, tokens[u])

    place = row[u] * (int(head.max()) + 1) + head[u]
    fresh = np.append(True, (place[1:] != place[:-1]) | (program[1:] != program[:-1]))
    ends = np.append(fresh[1:], True)
    number = np.cumsum(fresh) - 1
    first_number = number[np.searchsorted(place, place)]
    partials = np.bincount(place[fresh], minlength=int(place.max()) + 1)[place]

    # line p is program p's first piece; its other pieces follow after all the first ones
    begins = np.append(True, program[1:] != program[:-1])
    where = np.where(begins, program, programs + np.cumsum(~begins) - 1)
    follow = np.where(np.append(begins[1:], True), -1, np.append(where[1:], -1))
    table = np.zeros((programs + int((~begins).sum()), FIELDS), dtype=np.int64)
    table[:, -1] = -1
    columns = (
        *(part[u], row[u], head[u], first, last, k_start[u], v_start[u], channels[u]),
        *(fresh, np.where(ends, partials, 0), number, first_number, follow),
    )
    table[where] = np.stack([np.asarray(c, dtype=np.int64) for c in columns], 1)
    return table
