"""Where the parts of a layer that chooses its reads lie: one line per row and KV head, in a table on the device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from torch import Tensor

from leank.eval.cache.attention.ranking import Ranking
from leank.eval.cache.storage.store import Store


class Column(IntEnum):
    """Columns of the table; offsets count elements from the ring's first, those of scores in units of four bytes."""

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


def offset(base: Tensor, tensor: Tensor, size: int = 0) -> int:
    """Offset of `tensor` from `base` in units of `size` bytes, 0 = an element's: all is read through one pointer."""
    return (tensor.data_ptr() - base.data_ptr()) // (size or base.element_size())


def places(store: Store, ranking: Ranking, scores: Tensor, room: int, runs: int, group: int) -> np.ndarray:
    """The table's content, [B H, FIELDS] int64.

    scores: float32, at least [B Hq, room] scores and then [B Hq, runs] of runs
    group: query heads per KV head
    """
    base, prompt, tail = store.ring_k, store.prompt, store.tail
    heads = prompt.length.size
    number, dim = np.arange(heads), base.shape[-1]
    sink, ring = number * store.sizes.sink * dim, number * base.shape[2] * dim
    first = 0 if store.channels.first is None else store.channels.first
    bounds = 0 if ranking.bounds is None else offset(base, ranking.bounds.flat) + ranking.bounds.first
    of_scores = offset(base, scores, 4)
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
