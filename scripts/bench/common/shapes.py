"""Published shapes: a model with random weights, as time and memory do not depend on their values, and masks."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parents[3]
MASKS = ROOT / "leank_train/assets/masks/published"
LLAMA, QWEN = "llama3.1-8b-instruct.pth", "qwen2.5-7b-instruct.pth"
DIM, DTYPE = 128, torch.bfloat16  # of a head of either model, and of its cache


def llama8b(device: torch.device | str, dtype: torch.dtype = torch.bfloat16, layers: int = 32) -> PreTrainedModel:
    """A frozen decoder of Llama-3.1-8B's shape, made on the device."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072 + 1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)
