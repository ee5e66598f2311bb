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
CASES = {  # press, kernel, share of the tokens dropped, beta
    "snapkv": ("SnapKVPress", 5, 0.75, None),
    "snapkv_wide": ("SnapKVPress", 7, 0.5, None),
    "pyramidkv": ("PyramidKVPress", 5, 0.75, 2),
    "streaming_llm": ("StreamingLLMPress", None, 0.75, None),
}


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


def recorded():
    """{case: kept tokens of each layer and KV head}: the kept keys, found again among all of them."""
    import kvpress

    model, found = random_model(), {}
    whole = keys(model)
    for case, (press, kernel, ratio, beta) in CASES.items():
        given = {"window_size": WINDOW, "kernel_size": kernel, "beta": beta}
        chosen = getattr(kvpress, press)(ratio, **{k: v for k, v in given.items() if kernel and v is not None})
        cut = keys(model, chosen)
        same = [(some[:, :, None] == every[:, None]).all(-1) for some, every in zip(cut, whole, strict=True)]
        found[case] = [[sorted(head.nonzero()[:, 1].tolist()) for head in layer] for layer in same]
    return found


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout)
