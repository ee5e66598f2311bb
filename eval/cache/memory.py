"""How many bytes a compressed cache holds, by part, and how large a batch a GPU can hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.cache.layer import CompressedLayer
from eval.cache.storage.channels import layer_masks
from eval.cache.storage.pages import PAGE, round_up
from eval.cache.storage.quantised import Packing
from eval.cache.storage.store import Sizes, Store


@dataclass
class Memory:
    """Bytes. Tokens held in sink, window and middle; beside (what reads and eviction hold of them: bounds, scores);
    tables (indices, lengths, work tables); slack (room not yet filled); other (layers that are not compressed, and
    prompts not yet sealed).
    """

    sink: int = 0
    window: int = 0
    middle_k: int = 0
    middle_v: int = 0
    extra: int = 0
    tables: int = 0
    slack: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(asdict(self).values())

    def __add__(self, more: Memory) -> Memory:
        return Memory(**{name: value + getattr(more, name) for name, value in asdict(self).items()})


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor, however it is viewed."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def measure_store(store: Store) -> Memory:
    """Bytes of one sealed layer."""
    token = store.ring_k.shape[1] * store.ring_k.shape[3] * store.ring_k.element_size() * 2  # K and V of one row
    sink = int(np.minimum(store.seen, store.sizes.sink).sum()) * token
    window = int(np.maximum(0, store.seen - store.start).sum()) * token
    middle_k, middle_v = (sum(held) for held in zip(store.prompt.held(), store.tail.held(), strict=True))
    tensors = store.tensors()
    data = {"sink_k", "sink_v", "ring_k", "ring_v", "prompt.k", "prompt.v", "tail.k", "tail.v"}  # what holds tokens
    chosen = {n for n in tensors if n.startswith(("reads.", "eviction."))}
    room = sum(_storage(t)[1] for n, t in tensors.items() if n in data)
    extra, tables = (
        sum(dict(_storage(t) for n, t in tensors.items() if n in names).values())
        for names in (chosen, tensors.keys() - data - chosen)
    )
    slack = room - sink - window - middle_k - middle_v
    return Memory(sink, window, middle_k, middle_v, extra, tables, slack)


def measure(layers: list[Any], scratch: dict[str, Tensor]) -> Memory:
    """Bytes of all layers of a cache and of the scratch memory they share."""
    total = Memory(tables=sum(dict(map(_storage, scratch.values())).values()))
    for layer in layers:
        if isinstance(layer, CompressedLayer) and layer.store is not None:
            total += measure_store(layer.store)
        held = [t for t in (layer.keys, layer.values) if isinstance(t, Tensor)]
        total += Memory(other=sum(dict(map(_storage, held)).values()))
    return total


def bytes_per_row(
    mask: Any,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes | None = None,
    bits: Packing | None = None,
) -> int:
    """Bytes that one sequence of `context` prompt tokens takes in a sealed cache, padding of pages and slack of the
    window included, tables not. mask as in compressed_cache; bits: how the middle is packed, None = as it comes.
    """
    keep, sizes = layer_masks(mask), sizes or Sizes()
    layers, heads, dim = keep.shape
    middle = round_up(max(0, context - sizes.sink - sizes.window), PAGE)
    count = keep.sum(-1)
    ends = 2 * layers * heads * dim * (sizes.sink + sizes.ring)
    numbers = middle * int(count.sum()) + middle * dim * int((count > 0).sum())
    held = numbers * dtype.itemsize if bits is None else numbers // bits.group * bits.cell(dtype)
    return ends * dtype.itemsize + held


def max_batch(
    mask: Any,
    context: int,
    free_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes | None = None,
    bits: Packing | None = None,
) -> int:
    """The largest batch of `context` tokens each whose caches fit into `free_bytes` (GPU memory less weights and work
    space).
    """
    return free_bytes // bytes_per_row(mask, context, dtype, sizes, bits)
