"""Which tokens kvpress 0.5.5's presses keep of a small random model's prompt, for tests/eval/methods/test_tokens.py.

kvpress needs transformers < 5.3, so it runs in an environment of its own:
python -m tests.helpers.kvpress_tokens > tests/data/kvpress_tokens.json
"""

import json
import sys
from contextlib import nullcontext

from transformers import DynamicCache

from tests.helpers import kvpress_think

LAYERS, LENGTH, WINDOW = 4, 128, 8
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


def random_model():
    """The model whose keys are dropped."""
    return kvpress_think.random_model("llama", LAYERS)


def prompt():
    """Token ids [1, LENGTH]."""
    return kvpress_think.prompt(LENGTH)


def keys(model, hooks=None):
    """Every layer's keys [H, T, D] after the prompt, which a press may have cut."""
    cache = DynamicCache()
    with hooks(model) if hooks else nullcontext():
        model.model(prompt(), past_key_values=cache)
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


def recorded():
    """{case: kept tokens of each layer and KV head}: the kept keys, found again among all of them."""
    import kvpress

    model, found = random_model(), {}
    whole = keys(model)
    for case in CASES:
        cut = keys(model, press(case))
        same = [(some[:, :, None] == every[:, None]).all(-1) for some, every in zip(cut, whole, strict=True)]
        found[case] = [[sorted(head.nonzero()[:, 1].tolist()) for head in layer] for layer in same]
    for case, (inner, safeguard) in ADAPTIVE.items():
        found[case] = masked(model, kvpress.AdaKVPress(press(inner), alpha_safeguard=safeguard))
    return found


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout)
