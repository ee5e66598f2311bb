"""A compressed cache as a file: what the layers hold, in safetensors, with digests of the model, the mask and itself.

The file holds no code and nothing is unpickled. `CompressedCache.save` and `load` are the way in. The tables of a file
are checked, not only its digest: a kernel reads wherever they point.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from leank.data_gen.task import LONGEST
from leank.eval.cache.fingerprint import computing_device, model_digest
from leank.eval.cache.layer import CompressedLayer, State
from leank.eval.cache.storage.banded import Banded, codecs
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.tensor_files import DIGEST, DamagedFile, digest, read_tensors, write_tensors
from leank.typed import Checked, typed

FORMAT = "leank-cache-10"  # the name of the header in the file's metadata
CURE = "copy it again, or make it anew with save()"


@dataclass(frozen=True)
class Header(Checked):
    """What a file says beside its tensors."""

    model: str  # model, mask: digests
    mask: str
    sizes: Sizes  # of every compressed layer
    columns: Annotated[int, Ge(1), Le(LONGEST)]  # of the prompt and of what followed, padding included
    # of each layer, bits and group of a packed middle; None = it is in the model's dtype, or in the bits of its tensors
    # key_bits and value_bits, and of packed scales if it has a tensor "packed"
    packing: Sequence[Sequence[int] | None]


def mask_digest(masks: Mapping[int, Tensor | None]) -> str:
    """sha256 of the masks [H, D] of compressed layers by index; None is a layer that keeps every channel."""
    there = {str(i): keep.bool().cpu().contiguous() for i, keep in masks.items() if keep is not None and not keep.all()}
    return digest(there, {})


def save(
    path: str | os.PathLike[str], layers: Sequence[Any], model: PreTrainedModel, ids: Tensor | None = None
) -> None:
    """Write a cache's layers, and the ids [B, columns] that it has read, None = not known.

    Raises ValueError without a whole prompt, or with a part that a file cannot hold.
    """
    if not all(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise ValueError("a cache of a model with linear attention cannot be saved: a file holds tokens, not states")
    held = [_compressed(layer) if isinstance(layer, CompressedLayer) else _sliding(layer) for layer in layers]
    compressed = {i: layer for i, layer in enumerate(layers) if isinstance(layer, CompressedLayer)}
    packings = [layer.middle.bits if isinstance(layer, CompressedLayer) else None for layer in layers]
    header = Header(
        model_digest(model),
        mask_digest({i: layer.middle.channels for i, layer in compressed.items()}),
        next((layer.sizes for layer in compressed.values()), Sizes()),
        layers[0].get_seq_length(),
        [[bits.bits, bits.group] if isinstance(bits, Packing) else None for bits in packings],
    )
    tensors = {  # copies, because layers may share memory, and a file cannot
        f"{i}.{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for i, of_layer in enumerate(held)
        for name, tensor in of_layer.items()
    }
    if ids is not None:
        tensors["ids"] = ids.cpu().contiguous()
    write_tensors(path, tensors, {FORMAT: json.dumps(asdict(header))})


def _check_complete(complete: bool) -> None:
    if not complete:
        raise ValueError("save() needs a cache whose prompt is complete, and no assisted decoding under way")


def _compressed(layer: CompressedLayer) -> dict[str, Tensor]:
    store, middle = layer.store, layer.middle
    _check_complete(layer.state is State.COMPRESSED)
    assert store is not None
    if store.eviction is not None or store.reads is not None:
        raise ValueError("a cache that evicts tokens while decoding, or chooses what it reads, cannot be saved")
    if middle.bits is not None and type(middle.bits) not in (Packing, Banded):
        raise ValueError(
            f"a middle that {type(middle.bits).__name__} stores cannot be saved: leave out `bits`, or choose kivi"
        )
    tensors = store.saved()
    for name, mask, table in (("channels", middle.channels, store.channels), ("values", middle.values, store.values)):
        if mask is not None and table is not None:  # rows that have masks of their own may have changed places
            tensors[name] = mask.bool() if mask.ndim == 2 else table.mask()
    if middle.joins is not None:
        tensors["joins"] = middle.joins.bool()
    if isinstance(middle.bits, Banded):
        tensors |= middle.bits.tensors()
    return tensors if middle.center is None else {**tensors, "center": middle.center.float()}


def _sliding(layer: Any) -> dict[str, Tensor]:
    _check_complete(isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and not layer.record_past)
    return {"keys": layer.keys, "values": layer.values}


class Saved:
    """A file that `save` wrote, compared with its digest. Raises FileNotFoundError or DamagedFile.

    middles: how each layer keeps its middle, for `compressed_cache`; compressed: the layers that are compressed
    ids: [B, columns] that the cache has read, None = not known
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "does not exist"
            raise FileNotFoundError(f"{path} {what}; give a file that CompressedCache.save() wrote")
        try:
            with safe_open(path, framework="pt") as file:
                about, names = file.metadata() or {}, set(file.keys())
        except SafetensorError as error:
            raise DamagedFile(path, error, CURE) from error
        if missing := [key for key in (FORMAT, DIGEST) if key not in about]:
            raise DamagedFile(path, f"its header lacks {missing[0]!r}, and so save() did not write it", CURE)
        tensors, _ = read_tensors(path, names, CURE, (FORMAT,))
        try:
            self.header = typed(Header, json.loads(about[FORMAT]))
            self.layers: list[dict[str, Tensor]] = [{} for _ in self.header.packing]
            self.ids = tensors.pop("ids", None)
            if self.ids is not None and (self.ids.dtype != torch.int64 or self.ids.ndim != 2):
                raise ValueError("its ids are no table of whole numbers")
            if self.ids is not None and self.ids.shape[1] != self.header.columns:
                raise ValueError(f"it has ids of {self.ids.shape[1]} columns and holds {self.header.columns}")
            for name, tensor in tensors.items():
                index, of_layer = name.split(".", 1)
                self.layers[int(index)][of_layer] = tensor
            self.compressed = [i for i, own in enumerate(self.layers) if "seen" in own]
            banded = [i for i in self.compressed if "key_bits" in self.layers[i]]
            layouts: dict[int, Codec] = {}
            if banded:
                bits = (torch.stack([self.layers[i][name] for i in banded]) for name in ("key_bits", "value_bits"))
                packed = ["packed" in self.layers[i] for i in banded]
                if packed != packed[:1] * len(packed):
                    raise ValueError("some of its layers have packed scales, and others not")
                layouts.update(zip(banded, codecs(Precision(*bits, packed=packed[0])), strict=True))
            self.middles = [
                Middle(
                    own.get("channels"),
                    own.get("values"),
                    own.get("joins"),
                    Packing(*pages) if pages else layouts.get(i),
                    center=own.get("center"),
                )
                for i, (own, pages) in enumerate(zip(self.layers, self.header.packing, strict=True))
            ]
        except (ValueError, TypeError, IndexError, RecursionError) as error:
            raise DamagedFile(path, error, CURE) from error

    def check(self, model: PreTrainedModel, mask: ChannelMask | None) -> None:
        """Raise ValueError unless this model made the cache, with this mask; None = any mask."""
        if self.header.model != model_digest(model):
            kind = model.config.get_text_config(decoder=True).model_type
            raise ValueError(
                f"{self.path} was made by another model than this {kind}: its weights, adapters, positions, settings "
                "or dtype differ; load the model that made it"
            )
        if mask is None:
            return
        keep = mask.keep
        if self.header.mask != mask_digest({i: keep[i] for i in self.compressed if i < len(keep)}):
            raise ValueError(f"{self.path} was made with another mask; load that one, or leave mask out")
        bits = mask.precision
        keys, values = (None, None) if bits is None else (bits.key_bits, bits.value_bits)
        packed = None if bits is None or not bits.packed else torch.ones(len(keep), dtype=torch.bool)
        wanted = {
            "packed": (packed, "scales"),
            "center": (mask.mean_keys, "mean keys"),
            "key_bits": (keys, "bits of K"),
            "value_bits": (values, "bits of V"),
        }
        for name, (theirs, what) in wanted.items():
            for i in self.compressed:
                mine = self.layers[i].get(name)
                same = mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs[i])
                if not same:
                    raise ValueError(f"{self.path} was made with other {what}; load that mask, or leave mask out")

    def fill(self, layers: Sequence[Any], model: PreTrainedModel) -> None:
        """Put what the file holds into the new layers of this model. Raises DamagedFile for tables that cannot be."""
        columns, device = self.header.columns, computing_device(model)
        if self.compressed != [i for i, layer in enumerate(layers) if isinstance(layer, CompressedLayer)]:
            raise DamagedFile(self.path, "its layers are not the model's", CURE)
        for index, (layer, own) in enumerate(zip(layers, self.layers, strict=True)):
            try:
                if isinstance(layer, CompressedLayer):
                    store = Store.restore(own, layer.middle, layer.sizes, columns, device)
                    layer.resume(store, columns)
                elif isinstance(layer, DynamicSlidingWindowLayer):
                    k, v = (own[name].to(device) for name in ("keys", "values"))
                    layer.lazy_initialization(k, v)
                    layer.keys, layer.values, layer.cumulative_length = k, v, columns
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise DamagedFile(self.path, f"layer {index} holds what no cache holds ({error})", CURE) from error
