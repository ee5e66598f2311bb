"""A compressed cache as a file: what the layers hold, in safetensors, with digests of the model, the mask and itself.

The file holds no code and nothing is unpickled. `CompressedCache.save` and `load` are the way in. The tables of a file
are checked, not only its digest: a kernel reads wherever they point.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Le
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from leank.data_gen.request import LONGEST
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE, Extent, Segment
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.tensor_files import DIGEST, DamagedFile, digest, read_tensors, write_tensors
from leank.typed import Checked, OneOf, typed

FORMAT = "leank-cache-5"
KEYS = ("format", "model", "mask", "sink", "window", "flush", "layers")
CURE = "copy it again, or make it anew with save()"
SAMPLED = 64  # numbers of each weight that tell models apart
COUNTS = ("seen", "start", "floor")  # of each row, on the host
ENDS = ("sink_k", "sink_v", "ring_k", "ring_v")
SEGMENTS = ("prompt", "tail")


@dataclass(frozen=True)
class LayerHeader(Checked):
    """What the header says of one layer.

    kind: how its tokens are kept
    columns: of the prompt and of what followed, padding included
    names: of its tensors
    pages: bits and group of a packed middle, None = it is in the model's dtype
    """

    kind: Annotated[str, OneOf("compressed", "sliding")]
    columns: Annotated[int, Ge(1), Le(LONGEST)]
    names: Sequence[str]
    pages: Sequence[int] | None = None


def model_digest(model: PreTrainedModel) -> str:
    """sha256 of the language model's type and of every weight's name, shape, dtype and 64 evenly spaced numbers."""
    found = hashlib.sha256(model.config.get_text_config(decoder=True).model_type.encode())
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        if weight.numel() and not weight.is_meta:
            at = torch.linspace(0, weight.numel() - 1, min(SAMPLED, weight.numel()), dtype=torch.float64).long()
            found.update(weight.detach().flatten()[at.to(weight.device)].cpu().double().numpy().tobytes())
    return found.hexdigest()


def mask_digest(masks: Mapping[int, Tensor | None]) -> str:
    """sha256 of the masks [H, D] of compressed layers by index; None is a layer that keeps every channel."""
    there = {str(i): keep.bool().cpu().contiguous() for i, keep in masks.items() if keep is not None and not keep.all()}
    return digest(there, {})


# Writing


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
    write_tensors(path, tensors, about)


def _own_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU: layers may share memory, and a safetensors file cannot."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _compressed(layer: CompressedLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    store, middle = layer.store, layer.middle
    if store is None or layer.record_past:
        raise ValueError("save() needs a cache whose prompt is complete, and no assisted decoding under way")
    if middle.center is not None:
        raise ValueError("a cache whose keys are centered (mean_keys of its mask) cannot be saved")
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
        k, v = segment.without_spare()
        counts = {"length": segment.length, "capacity": segment.capacity}
        tensors |= {f"{name}.{n}": torch.from_numpy(count.copy()) for n, count in counts.items()}
        tensors |= {f"{name}.k": k, f"{name}.v": v}
    chosen = {"channels": middle.channels, "values": middle.values, "joins": middle.joins}
    tensors |= {f"middle.{name}": tensor.bool() for name, tensor in chosen.items() if tensor is not None}
    packing = None if middle.bits is None else [middle.bits.bits, middle.bits.group]
    about = {"kind": "compressed", "columns": layer.get_seq_length(), "pages": packing, "names": sorted(tensors)}
    return about, tensors


def _sliding(layer: DynamicSlidingWindowLayer | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if layer is None or not layer.is_initialized or layer.record_past:
        raise ValueError("save() needs a cache whose prompt is complete, and no assisted decoding under way")
    assert isinstance(layer.keys, Tensor)
    assert isinstance(layer.values, Tensor)
    tensors = {"keys": layer.keys, "values": layer.values}
    return {"kind": "sliding", "columns": layer.cumulative_length, "names": sorted(tensors)}, tensors


# Reading


class Saved:
    """A file that `save` wrote, read and compared with its own digest.

    sizes: of every compressed layer
    middles: how each layer keeps its middle, for `compressed_cache`

    Raises FileNotFoundError or DamagedFile.
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
        if about.get("format") != FORMAT:
            raise DamagedFile(path, f"it is no cache that save() wrote, whose format is {FORMAT}", CURE)
        try:
            if missing := [key for key in (*KEYS, DIGEST) if key not in about]:
                raise ValueError(f"its header lacks {missing[0]!r}")
            self.about = [typed(LayerHeader, one, f"layer {i}: ") for i, one in enumerate(json.loads(about["layers"]))]
            names = {f"{index}.{name}" for index, one in enumerate(self.about) for name in one.names}
            self.sizes = Sizes(*(int(about[name]) for name in ("sink", "window", "flush")))
            if len({one.columns for one in self.about}) != 1:
                raise ValueError("its layers have no common number of tokens")
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedFile(path, error, CURE) from error
        self.tensors, self.metadata = read_tensors(path, names, CURE, KEYS)
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
            return Middle(channels, values, joins, Packing(*one.pages) if one.pages else None)
        except (ValueError, TypeError) as error:
            raise DamagedFile(self.path, error, CURE) from error

    def fill(self, layers: Sequence[Any], model: PreTrainedModel) -> None:
        """Put what the file holds into the new layers of this model. Raises DamagedFile for tables that cannot be."""
        kinds = ["compressed" if isinstance(layer, CompressedLayer) else "sliding" for layer in layers]
        if kinds != [one.kind for one in self.about]:
            raise DamagedFile(self.path, "its layers are not the model's", CURE)
        for index, (layer, one) in enumerate(zip(layers, self.about, strict=True)):
            own = {name: self.tensors[f"{index}.{name}"] for name in one.names}
            try:
                if isinstance(layer, CompressedLayer):
                    store = _store(own, layer, model)
                    if (store.seen > one.columns).any():
                        raise ValueError("a row holds more tokens than came")
                    layer.resume(store, one.columns)
                elif isinstance(layer, DynamicSlidingWindowLayer):
                    k, v = (own[name].to(model.device) for name in ("keys", "values"))
                    layer.lazy_initialization(k, v)
                    layer.keys, layer.values, layer.cumulative_length = k, v, one.columns
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
