"""What kvpress 0.5.5's ThinKPress prunes on a small random model, for tests/eval/methods/test_channels.py.

kvpress needs transformers < 5.3, so it runs in an environment of its own:
python -m tests.helpers.kvpress_think > tests/data/kvpress_think.json
"""

import json
import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
RATIOS, WINDOW, LENGTH = (0.4, 0.7), 8, 40


def random_model(family, layers=2):
    """Six query heads on two KV heads, head_dim 16, float64; weights that no version draws differently."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    model = model_class(config).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def prompt(length=LENGTH):
    """Token ids [1, length]."""
    return torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(1))


def recorded():
    """{family: {ratio: pruned channels of each layer and KV head}} from kvpress."""
    from kvpress import ThinKPress

    found = {}
    for family in FAMILIES:
        model = random_model(family)
        for ratio in RATIOS:
            cache = DynamicCache()
            with ThinKPress(key_channel_compression_ratio=ratio, window_size=WINDOW)(model):
                model.model(prompt(), past_key_values=cache)
            pruned = [[(head == 0).all(0).nonzero().flatten().tolist() for head in x.keys[0]] for x in cache.layers]
            found.setdefault(family, {})[str(ratio)] = pruned
    return found


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout)
