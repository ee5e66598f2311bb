"""A file that was saved, compared with its digests and put into new layers, whose tables are checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from leank.data_gen.request import LONGEST
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.saved.header import (
    COUNTS,
    CURE,
    EARLIER,
    ENDS,
    FIELDS,
    KEYS,
    SEGMENTS,
    check_header,
    mask_digest,
    model_digest,
)
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.pages import PAGE, Extent
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.tensor_files import DamagedFile, read_tensors


class Saved:
    """A file that `save` wrote, read and compared with its own digest.

    sizes: of every compressed layer
    middles: how each layer keeps its middle, for `compressed_cache`

    Raises FileNotFoundError, DamagedFile, or ValueError for a file of an earlier version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} does not exist; give a file that CompressedCache.save() wrote")
        try:
            with safe_open(path, framework="pt") as file:
                about = dict(file.metadata() or {})
        except SafetensorError as error:
            raise DamagedFile(path, error, CURE) from error
        if about.get("format") in EARLIER:
            raise ValueError(f"{path} was saved by an earlier version, whose files have another form: save it again")
        try:
            check_header(about)
            self.about: list[dict[str, Any]] = json.loads(about["layers"])
            if unknown := [field for one in self.about for field in one if field not in FIELDS]:
                raise ValueError(f"its layers have {unknown[0]!r}, which save() does not write")
            names = {f"{index}.{name}" for index, one in enumerate(self.about) for name in one["names"]}
            self.sizes = Sizes(*(int(about[name]) for name in ("sink", "window", "flush")))
            columns = {repr(one["columns"]): one["columns"] for one in self.about}  # repr tells 1 from True
            if len(columns) != 1 or any(type(n) is not int or not 0 < n <= LONGEST for n in columns.values()):
                raise ValueError("its layers have no common number of tokens")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(path, error, CURE) from error
        self.tensors, self.metadata = read_tensors(path, names, CURE, (*KEYS, "digests"))
        self.middles = [self._middle(index) for index in range(len(self.about))]

    def check(self, model: PreTrainedModel, masks: Mapping[int, Tensor | None] | None) -> None:
        """Raise ValueError unless the cache was made by this model, and with these masks if there are any."""
        if self.metadata["model"] != model_digest(model):
            kind = model.config.get_text_config(decoder=True).model_type
            raise ValueError(
                f"{self.path} was made by another model than this {kind}: its weights, their names or dtype differ; "
                "load the model that made it"
            )
        if masks is not None and self.metadata["mask"] != mask_digest(masks):
            raise ValueError(f"{self.path} was made with another mask; load that one, or leave mask out")

    def _middle(self, index: int) -> Middle:
        one = self.about[index]
        channels, values, joins = (self.tensors.get(f"{index}.middle.{n}") for n in ("channels", "values", "joins"))
        try:
            return Middle(channels, values, joins, Packing(*one["pages"]) if one.get("pages") else None)
        except (ValueError, TypeError) as error:
            raise DamagedFile(self.path, error, CURE) from error

    def fill(self, layers: Sequence[Any], model: PreTrainedModel) -> None:
        """Put what the file holds into the new layers of this model. Raises DamagedFile for tables that cannot be."""
        kinds = ["compressed" if isinstance(layer, CompressedLayer) else "sliding" for layer in layers]
        if kinds != [one["kind"] for one in self.about]:
            raise DamagedFile(self.path, "its layers are not the model's", CURE)
        for index, (layer, one) in enumerate(zip(layers, self.about, strict=True)):
            own = {name: self.tensors[f"{index}.{name}"] for name in one["names"]}
            try:
                if isinstance(layer, CompressedLayer):
                    store = _store(own, layer, model)
                    if (store.seen > one["columns"]).any():
                        raise ValueError("a row holds more tokens than came")
                    layer.resume(store, one["columns"])
                elif isinstance(layer, DynamicSlidingWindowLayer):
                    k, v = (own[name].to(model.device) for name in ("keys", "values"))
                    layer.lazy_initialization(k, v)
                    layer.keys, layer.values, layer.cumulative_length = k, v, one["columns"]
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise DamagedFile(self.path, f"layer {index} holds what no cache holds ({error})", CURE) from error


def _store(own: Mapping[str, Tensor], layer: CompressedLayer, model: PreTrainedModel) -> Store:
    """The store of one layer, whose tables are checked: a kernel reads wherever they point."""
    sizes, middle, device = layer.sizes, layer.middle, model.device
    store = Store.__new__(Store)
    store.sizes, store.middle, store.quiet, store.version = sizes, middle, 0, 0
    store.plan, store.eviction, store.reads = None, None, None
    for name in COUNTS:
        setattr(store, name, _whole(own[name]))
    for name in ENDS:
        setattr(store, name, own[name].to(device))
    batch, heads, slots, dim = store.ring_k.shape
    store.seen_dev, store.start_dev = (torch.from_numpy(n.copy()).to(device) for n in (store.seen, store.start))
    store.channels = _kept(own, "channels", (batch, heads, dim), device)
    store.values = _kept(own, "values", (batch, heads, dim), device) if "values.count" in own else None
    held = store.seen - store.start
    right = (
        store.ring_v.shape == store.ring_k.shape
        and store.sink_k.shape == store.sink_v.shape == (batch, heads, sizes.sink, dim)
        and len({getattr(store, name).dtype for name in ENDS}) == 1
        and all(getattr(store, name).shape == (batch,) for name in COUNTS)
        and slots % PAGE == 0
        and bool((held <= slots).all())
        and bool(((store.start >= sizes.sink) & (store.start <= np.maximum(sizes.sink, store.seen))).all())
        and bool(((store.floor >= 0) & (store.floor <= store.seen)).all())
        and bool(((store.start == sizes.sink) | (store.floor - store.start >= sizes.window)).all())
    )
    if not right:
        raise ValueError("its sink and window do not fit together")
    store.prompt, store.tail = (_segment(own, name, store) for name in SEGMENTS)
    if (store.prompt.length + store.tail.length > (store.start - sizes.sink)[:, None]).any():
        raise ValueError("its middle holds more tokens than have left the window")
    return store


def _whole(table: Tensor) -> np.ndarray:
    """A table of counts on the host. Raises ValueError for one that is not of whole numbers."""
    if table.dtype != torch.int64:
        raise ValueError(f"a table of counts is of {table.dtype}")
    return table.numpy().copy()


def _kept(own: Mapping[str, Tensor], name: str, shape: tuple[int, ...], device: torch.device) -> KeptChannels:
    count, index = own[f"{name}.count"], own[f"{name}.index"]
    if index.shape != shape or count.shape != shape[:2] or index.dtype != torch.int32:
        raise ValueError("a table of channels has another shape")
    if ((count < 0) | (count > shape[-1])).any() or ((index < 0) | (index >= shape[-1])).any():
        raise ValueError("a table of channels names channels that there are not")
    return KeptChannels(_whole(count), index.to(device))


def _segment(own: Mapping[str, Tensor], name: str, store: Store) -> Segment:
    length, capacity = (_whole(own[f"{name}.{n}"]) for n in ("length", "capacity"))
    if capacity.shape != store.channels.count.shape or length.shape != capacity.shape or (capacity < 0).any():
        raise ValueError("a table of tokens has another shape")
    dim, dtype = store.ring_k.shape[-1], store.ring_k.dtype
    segment = store.middle.segment(Extent(store.channels, capacity, dim, dtype, store.values))
    k, v = own[f"{name}.k"], own[f"{name}.v"]
    if (segment.k.shape, segment.v.shape, segment.k.dtype) != (k.shape, v.shape, k.dtype) or k.dtype != v.dtype:
        raise ValueError("its middle has another size than its tables say")
    if ((length < 0) | (length > segment.capacity)).any():
        raise ValueError("a table of tokens names more than there is room for")
    segment.k, segment.v = k.to(store.ring_k.device), v.to(store.ring_k.device)
    segment.length, segment.length_dev = length, torch.from_numpy(length.copy()).to(store.ring_k.device)
    return segment
