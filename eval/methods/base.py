"""What a method of the tables is: a choice on each axis of how a compressed cache keeps its middle."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.cache import CompressedLayer, compressed_cache
from eval.cache.channels import KeptChannels
from eval.methods.axes import Axis, Channels
from eval.prefill import Prefill, PromptLayer

AXES = ("channels", "tokens", "bits", "reads", "prefill")


class _Rows:
    """Kept channels of one layer that differ from row to row, [B, H, D]; see eval.cache.channels.MaskChannels."""

    def __init__(self, keep: Tensor):
        self.keep = keep

    def choose(self, k: Tensor) -> KeptChannels:
        keep = self.keep.to(k.device)
        count = keep.sum(-1)
        order = torch.argsort(~keep, dim=-1, stable=True)
        index = torch.where(torch.arange(keep.shape[-1], device=k.device) < count[..., None], order, 0)
        return KeptChannels(count.cpu().numpy().astype(np.int64), index.to(torch.int32))


@dataclass(frozen=True)
class Method:
    """One row of the tables.

    label: its name there; channels, tokens, bits, reads, prefill: a choice on that axis, None = all of it. sink,
    window: tokens kept whole at both ends; flush: tokens that move at a time; backend: see
    eval.cache.compressed_cache. With no choice on any axis it is the dense cache itself.
    """

    label: str
    channels: Channels | None = None
    tokens: Axis | None = None
    bits: Axis | None = None
    reads: Axis | None = None
    prefill: Axis | None = None
    sink: int = 128
    window: int = 1024
    flush: int = 32
    backend: str = "auto"

    @property
    def axes(self) -> dict[str, Axis]:
        """The choices made, by axis."""
        return {name: choice for name in AXES if (choice := getattr(self, name)) is not None}

    @property
    def obs_queries(self) -> int:
        """How many of the prompt's last queries this method wants to see."""
        return max((choice.obs_queries for choice in self.axes.values()), default=0)

    def config(self) -> dict[str, Any]:
        """The whole configuration, as JSON."""
        if not self.axes:
            return {}
        from eval.methods import name_of

        chosen = {name: {"name": name_of(choice), **choice.identity()} for name, choice in self.axes.items()}
        return {**chosen, "sink": self.sink, "window": self.window, "flush": self.flush}

    def digest(self) -> str:
        """Ten hex digits of what the answers depend on."""
        return hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode()).hexdigest()[:10]

    def cache(self, model: PreTrainedModel, prefill: Prefill) -> Cache:
        """The cache with the prompts in it, ready to decode."""
        if self.channels is None or not any(isinstance(layer, PromptLayer) for layer in prefill.layers):
            return prefill.fork()
        config = model.config.get_text_config(decoder=True)
        keep = self.channels.keep(prefill, config)
        backend = "reference" if prefill.logits.device.type == "cpu" else self.backend
        cache = compressed_cache(
            model, keep if keep.ndim == 3 else keep[0], self.sink, self.window, self.flush, backend
        )
        for index, layer in enumerate(cache.layers):
            dense = prefill.layers[index]
            if not isinstance(layer, CompressedLayer):
                cache.layers[index] = copy.copy(dense)
                continue
            if keep.ndim == 4:
                layer.channels = _Rows(keep[:, index])  # type: ignore[assignment]
            layer.seal(dense.keys, dense.values, prefill.real)
        return cache
