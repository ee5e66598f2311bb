"""How many bytes of a cache a decoding step reads."""

from __future__ import annotations

import numpy as np

from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.pages import PAGE
from leank.eval.cache.storage.quantised import QuantisedSegment
from leank.eval.cache.storage.store import Store


def bytes_read(store: Store, group: int) -> int:
    """Bytes of K, V, bounds and labels that attention over one layer reads in a step; group: query heads a KV head.

    Where a method chooses, each query head reads what it has chosen, once more what another head has chosen, too.
    """
    held = measure_store(store)
    ends = held.sink + held.window
    ranking = getattr(store.reads, "ranking", None)
    if ranking is None:
        return ends + held.middle_k + held.middle_v
    count, (k, v) = store.prompt.channels.count, of_token(store)
    middle = store.prompt.length + store.tail.length
    chosen = np.minimum(middle, ranking.most * ranking.page) * group
    if ranking.bounds is None:
        ranked = middle * k * labels_of(store) / np.maximum(count, 1)
    else:  # in the model's precision, however the keys are stored
        ranked = -(-middle // ranking.page) * 2 * count * store.ring_k.element_size()
    return ends + round((chosen * (k + v) + ranked).sum())


def labels_of(store: Store) -> np.ndarray:
    """Kept channels of each head that are labels [B, H], wherever they are stored; without labels every one is."""
    kept, labels = store.channels, getattr(store.reads, "labels", None)
    if labels is None:
        return kept.count
    of_kept = labels.to(kept.index.device).expand(kept.index.shape).gather(-1, kept.index.long()).cpu().numpy()
    return (of_kept & (np.arange(of_kept.shape[-1]) < kept.count[..., None])).sum(-1)


def of_token(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of K and of V of one token of each head's middle [B, H]; of packed numbers scales and zero points, too."""
    part, size = store.prompt, store.ring_k.element_size()
    if isinstance(part, QuantisedSegment):
        k, v = part.packing.pages(part.head_dim, part.channels.count, part.dtype)
        return np.asarray(sum(k)) / PAGE, np.full(part.length.shape, sum(v) / PAGE)
    of_values = np.full(part.length.shape, part.head_dim) if part.values is None else part.values.count
    return part.channels.count * size, of_values * size
