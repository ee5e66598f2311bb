"""The model under test: where it is, its config and tokenizer without weights, and the weights."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from leank_train.hook import check_decoder


@dataclass(frozen=True)
class ModelConfig:
    """name: what tables call it. path: folder or hub id; None = the name itself ("reference" is shipped with the
    package). dtype, device: "auto" = bfloat16 on a GPU, float32 on a CPU. chat: whether prompts go through the chat
    template, "auto" = if there is one. revision: of a hub id."""

    name: str = "reference"
    path: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    chat: bool | str = "auto"
    revision: str | None = None

    @property
    def location(self) -> str:
        """Folder or hub id."""
        if self.path:
            return self.path
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
        return {"name": self.name, "path": self.path, "dtype": str(self.torch_dtype).removeprefix("torch."),
                "chat": self.chat, "revision": self.revision}  # fmt: skip


def load_config(settings: ModelConfig) -> tuple[Any, Any]:
    """(config, tokenizer), without weights. Raises ValueError if there is no such model."""
    try:
        config = AutoConfig.from_pretrained(settings.location, revision=settings.revision)
        tokenizer = AutoTokenizer.from_pretrained(settings.location, revision=settings.revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={settings.location} cannot be read ({str(error).splitlines()[0]}); give model.path=FOLDER with "
            "config.json, tokenizer and weights, or a hub id that this machine can reach"
        ) from error
    return config, tokenizer


def load_model(settings: ModelConfig) -> PreTrainedModel:
    """The model, frozen, on its device. Raises ValueError for a model without RoPE."""
    model = AutoModelForCausalLM.from_pretrained(
        settings.location, revision=settings.revision, dtype=settings.torch_dtype
    )
    check_decoder(model)
    model.to(settings.torch_device)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False)


def shape_of(config: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head_dim) of a model's config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim
