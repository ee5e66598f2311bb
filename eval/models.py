"""The model under test: where it is, its config and tokenizer without weights, and the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from leank_train.hook import check_decoder


@dataclass(frozen=True)
class ModelConfig:
    """name: "reference" (shipped with the package), a folder, or a hub name. dtype, device: "auto" = bfloat16 on a GPU,
    float32 on a CPU. chat: whether prompts go through the chat template, None = if there is one. overrides: of the
    model's config, such as YaRN's rope_parameters."""

    name: str = "reference"
    dtype: str = "auto"
    chat: bool | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"

    @property
    def label(self) -> str:
        """What tables call it: the name, or the last part of a folder's."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name

    @property
    def location(self) -> str:
        """Folder or hub name."""
        return str(files("leank_train") / "assets" / "reference") if self.name == "reference" else self.name

    @property
    def torch_device(self) -> torch.device:
        """The device to run on."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(automatic if self.device == "auto" else self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and cache. Raises ValueError for an unknown one."""
        if self.dtype == "auto":
            return torch.float32 if self.torch_device.type == "cpu" else torch.bfloat16
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"model.dtype={self.dtype!r} is unknown; use auto, float32, bfloat16 or float16")
        return dtype

    def identity(self) -> dict[str, Any]:
        """What the answers depend on, as JSON."""
        dtype = str(self.torch_dtype).removeprefix("torch.")
        return {"name": self.label, "dtype": dtype, "chat": self.chat, "overrides": dict(self.overrides)}


def load_config(settings: ModelConfig) -> tuple[Any, Any]:
    """(config, tokenizer), without weights. Raises ValueError if there is no such model."""
    try:
        config = AutoConfig.from_pretrained(settings.location)
        tokenizer = AutoTokenizer.from_pretrained(settings.location)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.name={settings.name} cannot be read ({str(error).splitlines()[0]}); give reference, a folder with "
            "config.json, tokenizer and weights, or a hub name that this machine can reach"
        ) from error
    for key, value in settings.overrides.items():
        if key == "rope_parameters":
            value = {**(getattr(config, key, None) or {}), **value}
        setattr(config, key, value)
    return config, tokenizer


def load_model(settings: ModelConfig) -> PreTrainedModel:
    """The model, frozen, on its device. Raises ValueError for a model without RoPE."""
    config, _ = load_config(settings)
    model = AutoModelForCausalLM.from_pretrained(settings.location, config=config, dtype=settings.torch_dtype)
    check_decoder(model)
    model.to(settings.torch_device)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False)


def shape_of(config: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim) of a model's config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim
