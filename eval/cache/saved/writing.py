"""What each layer holds, as tensors and a line of the header, written into one file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.saved.header import COUNTS, ENDS, FORMAT, SEGMENTS, digests, mask_digest, model_digest
from leank.eval.cache.storage.pages import PAGE
from leank.eval.cache.storage.quantised import Packing, QuantisedSegment
from leank.eval.cache.storage.segment import Segment
from leank.tensor_files import write_tensors


def save(path: str | os.PathLike[str], layers: Sequence[Any], model: PreTrainedModel) -> None:
    """Write the layers of a cache.

    Raises ValueError for a cache without a whole prompt, or with a part that a file cannot hold.
    """
    header: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    masks: dict[int, Tensor | None] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, CompressedLayer):
            masks[index] = layer.middle.channels
            about, own = _compressed(layer)
        else:
            about, own = _sliding(layer if isinstance(layer, DynamicSlidingWindowLayer) else None)
        header.append(about)
        tensors |= {f"{index}.{name}": _own_copy(tensor) for name, tensor in own.items()}
    sizes = next(layer.sizes for layer in layers if isinstance(layer, CompressedLayer))
    about = {"format": FORMAT, "model": model_digest(model), "mask": mask_digest(masks), "layers": json.dumps(header)}
    about |= {name: str(int(getattr(sizes, name))) for name in ("sink", "window", "flush")}
    write_tensors(path, tensors, {**about, "digests": json.dumps(digests(about))})


def _own_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU: layers may share memory, and a safetensors file cannot."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _compressed(layer: CompressedLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    store, middle = layer.store, layer.middle
    if store is None or layer.record_past:
        raise ValueError("save() needs a cache whose prompt is complete, and no assisted decoding under way")
    if store.eviction is not None or store.reads is not None:
        raise ValueError("a cache that evicts tokens while decoding, or chooses what it reads, cannot be saved")
    if middle.bits is not None and type(middle.bits) is not Packing:
        raise ValueError(
            f"a middle that {type(middle.bits).__name__} stores cannot be saved, only numbers of the model's type or "
            "KIVI's (pca, spark and turboquant have other forms): leave out `bits`, or choose kivi"
        )
    store.to(layer.device)
    tensors = {name: torch.from_numpy(getattr(store, name).copy()) for name in COUNTS}
    tensors |= {name: getattr(store, name) for name in ENDS}
    for name, table in (("channels", store.channels), ("values", store.values)):
        if table is not None:
            tensors |= {f"{name}.count": torch.from_numpy(table.count.copy()), f"{name}.index": table.index}
    for name in SEGMENTS:
        segment: Segment = getattr(store, name)
        k, v = without_spare(segment)
        counts = {"length": segment.length, "capacity": segment.capacity}
        tensors |= {f"{name}.{n}": torch.from_numpy(count.copy()) for n, count in counts.items()}
        tensors |= {f"{name}.k": k, f"{name}.v": v}
    chosen = {"channels": middle.channels, "values": middle.values, "joins": middle.joins}
    tensors |= {f"middle.{name}": tensor.bool() for name, tensor in chosen.items() if tensor is not None}
    packing = None if middle.bits is None else [middle.bits.bits, middle.bits.group]
    about = {"kind": "compressed", "columns": layer.get_seq_length(), "pages": packing, "names": sorted(tensors)}
    return about, tensors


def without_spare(segment: Segment) -> tuple[Tensor, Tensor]:
    """K and V, copies, with zeros where room is left, whose memory may hold anything."""
    if isinstance(segment, QuantisedSegment):
        return segment.without_spare()
    k, v = segment.k.cpu().clone(), segment.v.cpu().clone()
    for row, head in np.argwhere(segment.capacity > 0).tolist():
        held, room = int(segment.length[row, head]), int(segment.capacity[row, head])
        for flat, (of, start, size, _) in zip((k, v), segment.flats(), strict=True):
            region = flat[int(start[row, head]) :][: int(size[row, head])]
            if of is segment.v and segment.values is None:
                region.view(room, -1)[held:] = 0
                continue
            channels = int((segment.channels.count if of is segment.k else segment.width)[row, head])
            if channels:
                page = segment.page if of is segment.k else PAGE
                pages, (whole, rest) = region.view(room // page, channels, page), divmod(held, page)
                pages[whole + (rest > 0) :] = 0
                if rest:
                    pages[whole, :, rest:] = 0
    return k, v


def _sliding(layer: DynamicSlidingWindowLayer | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if layer is None or not layer.is_initialized or layer.record_past:
        raise ValueError("save() needs a cache whose prompt is complete, and no assisted decoding under way")
    assert isinstance(layer.keys, Tensor)
    assert isinstance(layer.values, Tensor)
    tensors = {"keys": layer.keys, "values": layer.values}
    return {"kind": "sliding", "columns": layer.cumulative_length, "names": sorted(tensors)}, tensors
