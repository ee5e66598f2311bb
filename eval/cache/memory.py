"""How many bytes a compressed cache holds, by part, and how large a batch a GPU can hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import InitVar, asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.states import StateLayer
from leank.eval.cache.storage import banded
from leank.eval.cache.storage.channels import MaskLike, layer_masks
from leank.eval.cache.storage.codecs import PageCodec, RecordSegment
from leank.eval.cache.storage.segment import PAGE, grown_room, numbers_held, round_up
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.mask import ChannelMask


@dataclass
class Memory:
    """Bytes that a cache holds, by part; printed, megabytes and the share of a dense cache.

    sink, window: tokens held whole
    middle_k, middle_v: tokens held compressed
    extra: what reads, eviction and codes keep of the prompt: bounds, scores, norms
    tables: indices, lengths, schedules, and the mask, which the layers share
    slack: room that is not filled yet
    other: layers that are not compressed, and prompts that are not compressed yet
    dense: bytes of a dense cache of the same tokens, padding not counted, 0 = not known; no part of `total`
    """

    sink: int = 0
    window: int = 0
    middle_k: int = 0
    middle_v: int = 0
    extra: int = 0
    tables: int = 0
    slack: int = 0
    other: int = 0
    dense: InitVar[int] = 0

    def __post_init__(self, dense: int) -> None:
        self._dense = dense

    @property
    def total(self) -> int:
        """All bytes held."""
        return sum(asdict(self).values())

    def __add__(self, more: Memory) -> Memory:
        parts = {name: value + getattr(more, name) for name, value in asdict(self).items()}
        return Memory(**parts, dense=self._dense + more._dense)

    def __str__(self) -> str:
        dense = self._dense
        share = f", {self.total / dense:.0%} of dense ({_megabytes(dense)} MB)" if dense else ""
        names = {"middle_k": "middle K", "middle_v": "middle V"}
        parts = [f"{names.get(name, name)} {_megabytes(size)}" for name, size in asdict(self).items() if size]
        idle = self.sink + self.window and not self.middle_k + self.middle_v
        return (
            f"{_megabytes(self.total)} MB{share}"
            + (": " + ", ".join(parts) if parts else "")
            + ("; nothing is compressed: all tokens are in sink and window, or no head keeps a middle" if idle else "")
        )


def _megabytes(size: int) -> str:
    """Bytes as 10^6 bytes, with as many digits as a reader needs."""
    if 0 < size < 500:
        return "<0.001"
    return f"{size / 1e6:.1f}" if size == 0 or size >= 100_000 else f"{size / 1e6:.3f}"


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor or a view of one."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def measure_store(store: Store, backend: Plain | None = None) -> Memory:
    """Bytes of one compressed layer, and of what its backend keeps for it."""
    token = store.ring_k.shape[1] * store.ring_k.shape[3] * store.ring_k.element_size() * 2  # K and V of one row
    sink = int(np.minimum(store.seen, store.sizes.sink).sum()) * token
    window = int(np.maximum(0, store.seen - store.start).sum()) * token
    middle_k, middle_v = (sum(held) for held in zip(store.prompt.held(), store.tail.held(), strict=True))
    plan = None if backend is None else backend.plan(store)
    tensors = store.tensors() | ({} if plan is None else {"plan": plan.table})
    data = {"sink_k", "sink_v", "ring_k", "ring_v", "prompt.k", "prompt.v", "tail.k", "tail.v"}  # these hold tokens
    records = {p: part.codec for p in ("prompt", "tail") if isinstance(part := getattr(store, p), RecordSegment)}
    chosen = {n for n in tensors if n.startswith(("reads.", "eviction."))}
    chosen |= {f"{p}.{n}" for p, codec in records.items() for n in codec.tensors()}
    chosen = {n for n in chosen if tensors[n].is_floating_point()}  # the others say where something lies
    room = sum(_storage(t)[1] for n, t in tensors.items() if n in data)
    extra, tables = (
        sum(dict(_storage(t) for n, t in tensors.items() if n in names).values())
        for names in (chosen, tensors.keys() - data - chosen)
    )
    slack = room - sink - window - middle_k - middle_v
    return Memory(sink, window, middle_k, middle_v, extra, tables, slack, dense=int(store.seen.sum()) * token)


def measure(layers: Iterable[Any], scratch: dict[str, Tensor]) -> Memory:
    """Bytes of all layers of a cache and of the scratch memory that they share."""
    total, masks = Memory(tables=sum(dict(map(_storage, scratch.values())).values())), dict[int, int]()
    for layer in layers:
        if isinstance(layer, CompressedLayer) and layer.store is not None:
            total += measure_store(layer.store, layer.backend)
            of_mask = vars(layer.middle).items()  # but for what the store counts
            own = [t for name, t in of_mask if name != "center" and isinstance(t, Tensor)]
            masks.update(map(_storage, own))
        parts = layer.states if isinstance(layer, StateLayer) else (layer.keys, layer.values)
        held = [t for t in parts if isinstance(t, Tensor)]
        other = sum(dict(map(_storage, held)).values())
        total += Memory(other=other, dense=other)
    return total + Memory(tables=sum(masks.values()))


def bytes_per_row(
    mask: MaskLike,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes | None = None,
    bits: PageCodec | None = None,
    reply: int = 0,
) -> int:
    """Bytes of one sequence in a compressed cache: spare room of pages and window is counted, tables are not.

    mask: as in `compressed_cache`; context: tokens of the prompt; sizes: None = the defaults of `Sizes`
    bits: how the middle is packed, None = as the mask says, or in the model's dtype
    reply: tokens that are decoded behind it, for which the middle grows
    Raises ValueError for bits beside those of a mask.
    """
    if isinstance(mask, str | os.PathLike):
        mask = ChannelMask.load(mask)
    keep, sizes = layer_masks(mask).cpu(), sizes or Sizes()
    layers, heads, dim = keep.shape
    count = keep.sum(-1).numpy()
    of_prompt = int(sizes.window_start(np.array(context))) - sizes.sink
    moved = sizes.moved(np.array(context), np.array(reply))
    middle = (round_up(of_prompt, PAGE) + int(grown_room(moved))) * (count > 0)
    ends = 2 * layers * heads * dim * (sizes.sink + sizes.ring) * dtype.itemsize
    if isinstance(mask, ChannelMask) and mask.precision is not None:
        if bits is not None:
            raise ValueError("the mask has bits per channel; leave out bits")
        layout = zip(banded.codecs(mask.precision), middle, count, strict=True)
        return ends + sum(sum(codec.held(tokens[None], own[None], dim, dtype)) for codec, tokens, own in layout)
    return ends + sum(numbers_held(middle, count, dim, dtype) if bits is None else bits.held(middle, count, dim, dtype))


def max_batch(
    mask: MaskLike,
    context: int,
    free_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sizes | None = None,
    bits: PageCodec | None = None,
    reply: int = 0,
) -> int:
    """The largest batch whose caches fit into `free_bytes`, weights taken off; see `bytes_per_row`."""
    return free_bytes // bytes_per_row(mask, context, dtype, sizes, bits, reply)
