"""The model under test, as leank.backbone loads it: its config and tokenizer without weights, and the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from leank import backbone
from leank.data_gen.chat import set_arguments
from leank.files import folder_digest
from leank.shipped import NAMED


@dataclass(frozen=True)
class ModelConfig(backbone.ModelConfig):
    """Settings of the model: those of training, and where it runs."""

    device: str = "auto"  # a device of torch; "auto" is a GPU where there is one
    chat_arguments: Mapping[str, object] = field(default_factory=dict)  # of the chat template: {enable_thinking: false}

    @property
    def label(self) -> str:
        """What tables call it: the name, or the last part of a folder's."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name

    @property
    def torch_device(self) -> torch.device:
        """The device to run on. Raises ValueError if the setting names none."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return backbone.usable_device(automatic if self.device == "auto" else self.device, "model.device")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and cache. Raises ValueError if the setting names none."""
        return backbone.torch_dtype(self.dtype, self.torch_device)

    @cached_property
    def _contents(self) -> dict[str, str]:
        """The digest of a folder; empty for a shipped model and for a name of the hub."""
        folder = self.name not in NAMED and Path(self.name).is_dir()
        return {"folder": folder_digest(Path(self.name))} if folder else {}

    def identity(self) -> dict[str, object]:
        """What the answers depend on, as JSON; a folder counts by what is in it, not by where it is."""
        dtype = str(self.torch_dtype).removeprefix("torch.")
        named = {"name": self.label, "dtype": dtype, "chat": self.chat, "overrides": dict(self.overrides)}
        if self.chat_arguments:
            named["chat_arguments"] = dict(self.chat_arguments)
        return {**named, **self._contents}


def load_config(settings: ModelConfig) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Return the model's config and tokenizer, whose chat template has the settings' arguments, without weights.

    Raises FileNotFoundError, or ValueError if something is damaged or the template has no such arguments.
    """
    config = backbone.load_config(settings.name, dict(settings.overrides))
    tokenizer = backbone.load_tokenizer(settings.name)
    set_arguments(tokenizer, settings.chat_arguments)
    return config, tokenizer


def load_model(settings: ModelConfig) -> PreTrainedModel:
    """The model, frozen, on its device. Raises FileNotFoundError without weights, ValueError without RoPE."""
    return backbone.load(
        settings.name, settings.dtype, settings.torch_device, chat=False, overrides=dict(settings.overrides)
    ).model


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """For each layer how many last tokens it holds at most, None for full attention, 0 for no or linear attention."""
    found: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        window = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else None
        found.append(window if isinstance(layer, CacheLayerMixin) else 0)
    return found
