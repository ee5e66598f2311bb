"""How many bytes of a cache a decoding step reads."""

from __future__ import annotations

import numpy as np

from eval.cache.memory import measure_store
from eval.cache.storage.store import Store


def bytes_read(store: Store, group: int) -> int:
    """Bytes of K, V, bounds and labels that attention over one layer reads in a step; group: query heads a KV head."""
    held = measure_store(store)
    ends = held.sink + held.window
    ranking = getattr(store.reads, "ranking", None)
    if ranking is None:
        return ends + held.middle_k + held.middle_v
    dim, count = store.ring_k.shape[3], store.channels.count
    middle = store.prompt.length + store.tail.length
    chosen = np.minimum(middle, ranking.most * ranking.page) * group
    first = 0 if store.channels.first is None else store.channels.first
    ranked = middle * first if ranking.bounds is None else -(-middle // ranking.page) * 2 * count
    numbers = np.asarray(chosen * (count + dim)).sum() + np.asarray(ranked).sum()
    return ends + int(numbers) * store.ring_k.element_size()
