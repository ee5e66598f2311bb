"""What caches hold and give back, to the last bit, beside `golden.json`: a change of storage must not go unseen.

    python -m tests.eval.cache.test_golden      # write golden.json anew; the commit says which entry changed, and why

All inputs are made of whole numbers, and what is stored of them is rounded element by element, so that the entries are
the same on every machine.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from leank.eval.cache import Sizes, compressed_cache
from leank.eval.cache.attention.backend import why_not_middle
from leank.eval.cache.memory import measure_store
from leank.eval.cache.storage.banded import codecs
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import Store
from leank.eval.methods.bits.fp8 import Scaled
from leank.precision import Precision
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, tiny_model

GOLDEN = Path(__file__).with_name("golden.json")
SIZES = Sizes(4, 70, 64)
WIDTHS = (2, 3, 4, 8, 16)  # of the layout, whatever others there are
NAMES = ("mask", "means", "kivi 2", "kivi 4", "kivi 8", "layout", "fp8", "heavy hitters")


def numbers(seed: int, *shape: int) -> Tensor:
    """Whole numbers over 256, which bfloat16 rounds."""
    return torch.randint(-2048, 2049, shape, generator=torch.Generator().manual_seed(seed)).float() / 256


def middles(name: str, layers: int, heads: int, dim: int) -> list[Middle]:
    """The middle of every layer under one recipe; the first head of the first layer is empty."""
    keep = torch.randint(3, (layers, heads, dim), generator=torch.Generator().manual_seed(3)) > 0
    keep[0, 0] = False
    some: list[dict] = [{} for _ in range(layers)]
    if name.startswith("kivi"):
        some = [{"bits": Packing(int(name[-1]), min(32, dim))} for _ in range(layers)]
    elif name == "layout":
        which = torch.randint(5, (layers, heads, dim), generator=torch.Generator().manual_seed(4)) + 1
        of_keys = torch.tensor(WIDTHS, dtype=torch.uint8)[which - 1] * keep
        of_values = torch.tensor(WIDTHS, dtype=torch.uint8).repeat(layers * heads)[: layers * heads]
        some = [{"bits": codec} for codec in codecs(Precision(of_keys, of_values.view(layers, heads)))]
    elif name == "fp8":
        some = [{"bits": Scaled(0.5)} for _ in range(layers)]
    elif name == "means":
        some = [{"center": center} for center in numbers(5, layers, heads, dim)]
    elif name == "heavy hitters":
        some = [{"eviction": HeavyHitters(100)} for _ in range(layers)]
    return [Middle(own, **more) for own, more in zip(keep, some, strict=True)]


def digest(*tensors: Tensor | np.ndarray) -> str:
    """The first 16 digits of the sha256 of their bytes."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(torch.as_tensor(x).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def schedule(store: Store) -> str | None:
    """Which program reads which tokens in which order: the columns of the kernels' table that no address is in."""
    if why_not_middle(store.middle) is not None:
        return None
    pytest.importorskip("triton")
    from leank.eval.cache.attention.launch import Kernel
    from leank.eval.cache.attention.schedule import Split

    columns = ["KIND", "ROW", "HEAD", "FIRST", "LAST", "FRESH", "PARTIALS", "NUMBER", "FIRST_NUMBER", "NEXT"]
    table = Kernel(programs=7).prepare(store).table
    return digest(table[:, [Split[name] for name in columns]])


def of_store(name: str) -> dict[str, object]:
    """One layer of two rows, one padded, that has moved tokens out of its window: its bytes, pages and numbers."""
    middle = middles(name, 1, 3, 64)[0]
    real = torch.arange(301) >= torch.tensor([[0], [131]])
    k, v = numbers(1, 2, 2, 3, 301, 64).bfloat16()
    scores = numbers(2, 2, 3, 301) if middle.eviction is not None else None
    store = Store(k, v, real, middle, SIZES, None, scores)
    for seed in (6, 7):
        store.append(*numbers(seed, 2, 2, 3, 66, 64).bfloat16())
        if store.eviction is not None:
            store.eviction.add(numbers(seed, 6, int(store.held().max())), store.held())
        store.flush()
    memory = measure_store(store)
    parts = ("sink", "window", "middle_k", "middle_v", "extra", "slack")
    held = [x for part in (store.prompt, store.tail) for at in np.ndindex(2, 3) for x in part.read(*at)]
    return {
        "bytes": {part: getattr(memory, part) for part in parts},
        "schedule": schedule(store),
        "tokens": (store.prompt.length + store.tail.length).tolist(),
        "ends": digest(store.sink_k, store.sink_v, store.ring_k, store.ring_v),
        "pages": digest(store.prompt.k, store.prompt.v, store.tail.k, store.tail.v),
        "numbers": digest(*held),
    }


def of_cache(name: str, folder: Path) -> dict[str, object]:
    """What a model of two layers generates over a cache, and the file of that cache."""
    model = tiny_model("llama")
    for seed, weight in enumerate(model.parameters()):
        if weight.ndim == 2:
            weight.copy_(numbers(seed + 20, *weight.shape) / 8)
    sizes = SIZES if name == "layout" else Sizes(4, 70, 32)
    cache = compressed_cache(model, middles(name, LAYERS, HEADS, DIM), sizes.sink, sizes.window, sizes.flush)
    ids = torch.randint(2, 89, (2, 150), generator=torch.Generator().manual_seed(8))
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    found: dict[str, object] = {"reply": digest(tokens[:, 150:])}
    if name not in ("heavy hitters", "fp8"):  # which cannot be saved
        cache.reset()
        for layer, seed in zip(cache.compressed, range(40, 50), strict=False):
            layer.compress(*numbers(seed, 2, 2, HEADS, 150, DIM).double())
        cache.save(folder / "cache")
        found["file"] = hashlib.sha256((folder / "cache").read_bytes()).hexdigest()[:16]
    return found


def golden(name: str, folder: Path) -> dict[str, object]:
    """The entry of a recipe."""
    return {**of_store(name), **of_cache(name, folder)}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_cache_holds_is_what_it_held(name, tmp_path):
    assert golden(name, tmp_path) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        entries = {name: golden(name, Path(made)) for name in NAMES}
    GOLDEN.write_text(json.dumps(entries, indent=1) + "\n")
