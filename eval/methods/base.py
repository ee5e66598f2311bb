"""What a method of the tables is: a choice on the axes of how a compressed cache keeps its middle.

Today's axis is *channels*; every choice on it is a file of its own with a small frozen dataclass, whose fields are its
configuration. A combination is a `Method`, never a new class.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from eval.cache import CompressedLayer, compressed_cache
from eval.cache.channels import KeptChannels
from eval.prefill import Prefill, PromptLayer

Observe = Callable[[Any, int], Prefill]  # (data_gen Sample, obs_queries) -> its dense pass


class Channels:
    """A choice on the channels axis. Subclasses are frozen dataclasses.

    obs_queries: how many of the prompt's last queries `keep` wants to see.
    """

    obs_queries = 0

    def check(self, config: Any, tokenizer: Any) -> None:
        """Raise ValueError or FileNotFoundError if this cannot run on such a model; no weights are loaded yet."""

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        """Look at samples once, before the first batch."""

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as JSON; by default every field."""
        return asdict(self)  # type: ignore[call-overload]

    def keep(self, prefill: Prefill, config: Any) -> Tensor:
        """Kept channels, bool [L, H, D] for all rows or [B, L, H, D]."""
        raise NotImplementedError


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

    label: its name there; channels: None keeps all. sink, window: tokens kept whole at both ends; flush: tokens that
    move at a time; backend: see eval.cache.compressed_cache. With no choice on any axis it is the dense cache itself.
    """

    label: str
    channels: Channels | None = None
    sink: int = 128
    window: int = 1024
    flush: int = 32
    backend: str = "auto"

    @property
    def obs_queries(self) -> int:
        """How many of the prompt's last queries this method wants to see."""
        return self.channels.obs_queries if self.channels else 0

    def config(self) -> dict[str, Any]:
        """The whole configuration, as JSON."""
        if self.channels is None:
            return {}
        from eval.methods import name_of

        axis = {"name": name_of(self.channels), **self.channels.identity()}
        return {"channels": axis, "sink": self.sink, "window": self.window, "flush": self.flush}

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
