"""What kvpress 0.5.5 chooses on small random models: channels that ThinKPress prunes, tokens that presses keep.

kvpress needs transformers < 5.3, so it runs in an environment of its own, here and with `tokens`:
python -m tests.helpers.kvpress think > tests/data/kvpress_think.json
"""

import json
import sys
from contextlib import nullcontext

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
RATIOS, WINDOW = (0.4, 0.7), 8
LENGTH = 128  # tokens of the prompt of which some are kept; 40 where channels are
SNAPKV = {"window_size": WINDOW, "kernel_size": 5}
CASES = {  # press, share of the tokens dropped, its settings
    "snapkv": ("SnapKVPress", 0.75, SNAPKV),
    "snapkv_wide": ("SnapKVPress", 0.5, {**SNAPKV, "kernel_size": 7}),
    "pyramidkv": ("PyramidKVPress", 0.75, {**SNAPKV, "beta": 2}),
    "streaming_llm": ("StreamingLLMPress", 0.75, {}),
    "tova": ("TOVAPress", 0.75, {}),
    "keydiff": ("KeyDiffPress", 0.75, {}),
    "expected": ("ExpectedAttentionPress", 0.75, {"n_future_positions": 32}),
    "expected_mean": ("ExpectedAttentionPress", 0.5, {"use_covariance": False, "epsilon": 0.02}),
}
ADAPTIVE = {"adakv": ("snapkv", 0.2), "adakv_loose": ("snapkv_wide", 0.0), "adakv_expected": ("expected", 0.5)}


def random_model(family="llama", layers=2):
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


def prompt(length=40):
    """Token ids [1, length]."""
    return torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(1))


def keys(model, hooks=None, length=LENGTH):
    """Every layer's keys [H, T, D] after the prompt, which a press may have cut."""
    cache = DynamicCache()
    with hooks(model) if hooks else nullcontext():
        model.model(prompt(length), past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def press(case):
    """The press of a case."""
    import kvpress

    name, ratio, settings = CASES[case]
    return getattr(kvpress, name)(ratio, **settings)


def masked(model, chosen):
    """Kept tokens of each layer and KV head under a press that drops none but remembers which it would mask."""
    keys(model, chosen)
    kept = []
    for layer in model.model.layers:
        _, heads, tokens = layer.self_attn.masked_key_indices
        gone = set(zip(heads.tolist(), tokens.tolist(), strict=True))
        kept.append([[t for t in range(LENGTH) if (h, t) not in gone] for h in range(2)])
    return kept


def think():
    """{family: {ratio: pruned channels of each layer and KV head}}."""
    from kvpress import ThinKPress

    found = {}
    for family in FAMILIES:
        model = random_model(family)
        for ratio in RATIOS:
            cut = keys(model, ThinKPress(key_channel_compression_ratio=ratio, window_size=WINDOW), 40)
            pruned = [[(head == 0).all(0).nonzero().flatten().tolist() for head in layer] for layer in cut]
            found.setdefault(family, {})[str(ratio)] = pruned
    return found


def tokens():
    """{case: kept tokens of each layer and KV head}: the kept keys, found again among all of them."""
    import kvpress

    model, found = random_model(layers=4), {}
    whole = keys(model)
    for case in CASES:
        cut = keys(model, press(case))
        same = [(some[:, :, None] == every[:, None]).all(-1) for some, every in zip(cut, whole, strict=True)]
        found[case] = [[sorted(head.nonzero()[:, 1].tolist()) for head in layer] for layer in same]
    for case, (inner, safeguard) in ADAPTIVE.items():
        found[case] = masked(model, kvpress.AdaKVPress(press(inner), alpha_safeguard=safeguard))
    return found


if __name__ == "__main__":
    json.dump({"think": think, "tokens": tokens}[sys.argv[1]](), sys.stdout)
