"""The schedule, by which one launch reads a whole ragged layer while every program takes the same time.

A *part* is the sink, the prompt's middle, the decoded middle or the window of one row and KV head. Parts follow each
other row by row, head by head. The line of all their costs is cut into equal spans at tile boundaries, one span per
program. Costs are counted in bytes. A tile also costs `TILE_BYTES`, however small it is: a program loads a fixed number
of tiles ahead, not of bytes. A *split* is what a program reads of one part. The splits that a program reads of one
(row, head) form one partial result. The last program to finish a (row, head) merges its partial results.

The kernels' constants are made of these columns: `kernels.columns` for Triton, `codes.constants` for CUDA.
"""

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from torch import Tensor

from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import Store

SINK, WINDOW, PROMPT, TAIL = range(4)
PARTS = 4
# what a tile costs beside its bytes, and what it costs to start a split, as bytes that could have been read meanwhile
TILE_BYTES, SPLIT_BYTES = 20480, 114688


class Part(IntEnum):
    """Columns of the table of parts; a line is one part, and its numbers are int64."""

    KIND = 0  # SINK, WINDOW, PROMPT or TAIL
    ROW = 1
    HEAD = 2  # KV head
    TOKENS = 3  # in sink and window, slots
    COST = 4  # of PAGE tokens, in bytes
    K_START = 5  # first element of the part's K, counted from the first of the ring's K; bytes where it holds codes
    V_START = 6  # the same of V
    CHANNELS = 7  # kept channels of K
    WIDTH = 8  # kept channels of V
    # of a middle in bits: channels of K in 16, 8 and 4 bits, those in 3 and 2, those of them in 3, and the bits of V
    WHOLE = 9
    EIGHT = 10
    FOUR = 11
    NARROW = 12
    THIRD = 13
    VALUES = 14
    VARIANT = 15  # number of the variant of the kernel in Triton that reads the head (`variants`)


class Split(IntEnum):
    """Columns of the schedule; a line is one split, and its numbers are int64."""

    KIND = 0  # as in Part
    ROW = 1
    HEAD = 2
    FIRST = 3  # first token of the split, counted from the part's first; in sink and window, its slot
    LAST = 4  # the token behind the split
    K_START = 5  # as in Part, up to WIDTH
    V_START = 6
    CHANNELS = 7
    WIDTH = 8
    FRESH = 9  # 1 if the split begins a partial result, else 0
    PARTIALS = 10  # partial results of this (row, head) if the split ends one, else 0
    NUMBER = 11  # number of the partial result
    FIRST_NUMBER = 12  # number of the (row, head)'s first partial result
    NEXT = 13  # the program's next line, -1 = none
    WHOLE = 14  # as in Part, up to VARIANT
    EIGHT = 15
    FOUR = 16
    NARROW = 17
    THIRD = 18
    VALUES = 19
    VARIANT = 20


FIELDS = len(Split)
COPIED = [name for name in Part.__members__ if name in Split.__members__]  # columns that a split has of its part
BITS = (Part.WHOLE, Part.EIGHT, Part.FOUR, Part.NARROW, Part.THIRD, Part.VALUES)


def offset(base: Tensor, tensor: Tensor) -> int:
    """Offset of `tensor` from `base` in elements of `tensor`: a kernel reads all parts through one pointer."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def parts(store: Store, cost: np.ndarray | None = None, columns: Mapping[Part, np.ndarray] | None = None) -> np.ndarray:
    """The parts of a store in the order in which they are read. Returns [P, columns of Part] int64.

    cost: [B or 1, H], bytes that a page of the middle counts as; None = those of its numbers in the model's dtype
    columns: [B or 1, H], further columns of the middle of every head, else 0
    """
    base = store.ring_k
    batch, heads, _, dim = base.shape
    number, page = np.arange(batch * heads), PAGE * base.element_size()
    of_head = batch * heads, PARTS, len(Part)  # the parts of a row and head in the order of reading
    table = np.zeros(of_head, dtype=np.int64)
    table[:, :, Part.KIND] = SINK, PROMPT, TAIL, WINDOW
    table[:, :, Part.ROW], table[:, :, Part.HEAD] = np.divmod(number[:, None], heads)
    for at, k, v in ((0, store.sink_k, store.sink_v), (3, store.ring_k, store.ring_v)):
        start = number * (k.shape[2] * dim)
        table[:, at, Part.TOKENS] = k.shape[2]
        table[:, at, Part.COST] = 2 * dim * page
        table[:, at, Part.K_START] = offset(base, k) + start
        table[:, at, Part.V_START] = offset(base, v) + start
        table[:, at, [Part.CHANNELS, Part.WIDTH]] = dim
    for at, segment, tokens in ((1, store.prompt, store.prompt.length), (2, store.tail, store.tail.capacity)):
        of_page = (segment.channels.count + segment.width) * page if cost is None else cost
        table[:, at, Part.TOKENS] = tokens.reshape(-1)
        table[:, at, Part.COST] = np.broadcast_to(of_page, tokens.shape).reshape(-1)
        table[:, at, Part.K_START] = offset(base, segment.k) + segment.k_start.reshape(-1)
        table[:, at, Part.V_START] = offset(base, segment.v) + segment.v_start.reshape(-1)
        table[:, at, Part.CHANNELS] = segment.channels.count.reshape(-1)
        table[:, at, Part.WIDTH] = segment.width.reshape(-1)
        for column, of_heads in (columns or {}).items():
            table[:, at, column] = np.broadcast_to(of_heads, tokens.shape).reshape(-1)
    found = table.reshape(-1, len(Part))
    return found[found[:, Part.TOKENS] > 0]


def _bounds(tiles: np.ndarray, weight: np.ndarray, programs: int, split: int) -> np.ndarray:
    """The tile at which each program but the first begins, on the line of all tiles; tiles, weight: [P], see `cut`."""
    cost = tiles * weight + split
    begin = np.cumsum(cost) - cost
    goal = np.arange(1, programs) * (cost.sum() / programs)
    at = np.searchsorted(begin, goal, side="right") - 1
    into = np.clip(np.rint((goal - begin[at]) / weight[at]), 0, tiles[at]).astype(np.int64)
    return np.maximum.accumulate((np.cumsum(tiles) - tiles)[at] + into)


def cut(
    part: np.ndarray,
    programs: int,
    tile: int,
    slow: float = 1.0,
    per_tile: int = TILE_BYTES,
    split: int = SPLIT_BYTES,
) -> np.ndarray:
    """Cut the parts [P, columns of Part] into equal spans, one per program.

    Two programs over a head that holds 64 tokens of a sink (128 channels of K and of V) and 640 of a middle (32 of K):
    the tiles of 64 tokens, 1 and 10 of them, follow each other on one line. A tile of the middle costs 64 x (32 + 128)
    x 2 bytes, one of the sink 64 x (128 + 128) x 2, and each 20,480 more; either part costs 114,688 to start. So the
    line is cut behind 4 tiles of the middle, and the schedule is

        line  kind    first  last  fresh  partials  number  next
        0     SINK        0    64      1         0       0     2   program 0 begins here,
        1     PROMPT    256   640      1         2       1    -1   program 1 here, and reads one split
        2     PROMPT      0   256      0         2       0    -1   program 0 goes on here

    Both programs have one partial result of the head's 2; 0 and 1 are their numbers.

    tile: tokens that a program reads at a time
    slow: how much longer a byte of the middle takes than one of sink and window
    per_tile, split: what a tile costs beside its bytes, and what it costs to start a split, in bytes
    Returns the schedule [>= programs, FIELDS] int64; a program's line p that reads nothing is an empty split.
    """
    kind, row, head, tokens, cost = part[:, : Part.COST + 1].T
    tiles = -(-tokens // tile)
    weight = cost * (tile / PAGE) * np.where(kind < PROMPT, 1, slow) + per_tile
    line = np.cumsum(tiles) - tiles  # first tile of each part on the line of all tiles
    total = int(tiles.sum())
    bounds = _bounds(tiles, weight, programs, split)
    cuts = np.sort(np.concatenate([line, bounds[bounds < total]]))
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])]
    u = np.searchsorted(line, cuts, side="right") - 1
    program = np.searchsorted(bounds, cuts, side="right")

    place = row[u] * (int(head.max()) + 1) + head[u]
    fresh = np.append(True, (place[1:] != place[:-1]) | (program[1:] != program[:-1]))
    ends = np.append(fresh[1:], True)
    number = np.cumsum(fresh) - 1
    partials = np.bincount(place[fresh], minlength=int(place.max()) + 1)[place]

    splits = np.empty((len(cuts), FIELDS), dtype=np.int64)
    splits[:, [Split[name] for name in COPIED]] = part[u][:, [Part[name] for name in COPIED]]
    splits[:, Split.FIRST] = (cuts - line[u]) * tile
    splits[:, Split.LAST] = np.minimum((np.append(cuts[1:], total) - line[u]) * tile, tokens[u])
    splits[:, Split.FRESH] = fresh
    splits[:, Split.PARTIALS] = np.where(ends, partials, 0)
    splits[:, Split.NUMBER] = number
    splits[:, Split.FIRST_NUMBER] = number[np.searchsorted(place, place)]
    return _lined_up(splits, program, programs)


def _lined_up(splits: np.ndarray, program: np.ndarray, programs: int) -> np.ndarray:
    """The schedule of splits [P, FIELDS] in the order of reading, with NEXT; program: [P], ascending.

    Line p is program p's first split. Its other splits follow after the first splits of all programs.
    """
    begins = np.append(True, program[1:] != program[:-1])
    line = np.where(begins, program, programs + np.cumsum(~begins) - 1)
    splits[:, Split.NEXT] = np.where(np.append(begins[1:], True), -1, np.append(line[1:], -1))
    table = np.zeros((programs + int((~begins).sum()), FIELDS), dtype=np.int64)
    table[:, Split.NEXT] = -1  # of programs that read nothing
    table[line] = splits
    return table
