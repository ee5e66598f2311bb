"""What a captured decoding step reads of a layer at fixed addresses, so that another prompt can be put there.

The sink and the middle may lie anywhere, since the kernel finds them through its work table. The window's ring, the
counts, the channel table and the work table itself must stay where they were when the step was captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from leank.eval.cache.storage.store import BackendPlan, Store


@dataclass(frozen=True)
class Addresses:
    """Tensors of one layer that a captured step reads, and on the host what it was compiled for.

    ring_k, ring_v: [B, H, slots, D]
    seen, start: int64 [B], on the device
    channels: int32 [B, H, D]
    tail_length: int64 [B, H], on the device
    ranks: int32 [B, H, D], of the kept channels of V, None = all are kept
    count, width: [B, H], kept channels of K and of V
    first: [B, H], those of K's that are labels, None = there are none
    plan: that whose table is read
    version: of the store
    """

    ring_k: Tensor
    ring_v: Tensor
    seen: Tensor
    start: Tensor
    channels: Tensor
    tail_length: Tensor
    ranks: Tensor | None
    count: np.ndarray
    width: np.ndarray
    first: np.ndarray | None
    plan: BackendPlan | None
    version: int

    @classmethod
    def of(cls, store: Store) -> Addresses:
        """Those of a sealed layer."""
        ring, counts = (store.ring_k, store.ring_v), (store.seen_dev, store.start_dev)
        tables, ranks = (store.channels.index, store.tail.length_dev), None
        if store.values is not None:
            ranks = store.values.ranks()
        channels = store.channels
        kept = channels.count, store.prompt.width
        return cls(*ring, *counts, *tables, ranks, *kept, channels.first, store.plan, store.version)

    def key(self) -> tuple[object, ...]:
        """Equal for two layers of which one captured step can read either."""
        tensors = (*self._tensors(), *(() if self.plan is None else (self.plan.table,)))
        first = None if self.first is None else self.first.tobytes()
        return *(_key(tensor) for tensor in tensors), self.count.tobytes(), self.width.tobytes(), first

    def _tensors(self) -> tuple[Tensor, ...]:
        always = self.ring_k, self.ring_v, self.seen, self.start, self.channels, self.tail_length
        return always if self.ranks is None else (*always, self.ranks)

    def take(self, store: Store) -> None:
        """Move what `store` holds to these addresses, whose own content is lost; not if any shape differs."""
        store.fit(0)  # a prompt's ring may be shorter than the ring of decoding
        new = Addresses.of(store)
        if [_form(t) for t in self._tensors()] != [_form(t) for t in new._tensors()]:
            return
        for here, there in zip(self._tensors(), new._tensors(), strict=True):
            shared = here.stride(0) == 0  # the channel table of a mask that all rows share
            (here[:1] if shared else here).copy_(there[:1] if shared else there)
        store.ring_k, store.ring_v, store.seen_dev, store.start_dev = self._tensors()[:4]
        store.channels.index, store.tail.length_dev = self.channels, self.tail_length
        if store.values is not None and self.ranks is not None:
            store.values.keep_ranks(self.ranks)
        store.plan, store.version = self.plan, self.version + 1  # the table is out of date, and its address stays


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _key(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), *_form(tensor)
