"""Compressed caches for generate(): sink | middle | window, ragged per KV head (LeanK, sections 3.3 and 4.3).

    cache = compressed_cache(model, "mask.safetensors")
    model.generate(**inputs, past_key_values=cache)

Read `naive` first (what a cache computes, in plain loops), then `cache` (the cache of a model) and `layer` (one layer
of it, and how transformers calls it). `storage` keeps the tokens: `store` is one layer's, `segment` its ragged middle.
`attention` reads them: `batched` in plain PyTorch, `kernels` in Triton. `hook` registers both with transformers;
`memory` counts bytes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leank.eval.cache.cache import CompressedCache, compressed_cache
    from leank.eval.cache.layer import CompressedLayer
    from leank.eval.cache.memory import bytes_per_row, max_batch
    from leank.eval.cache.storage.sizes import Sizes

__all__ = ["CompressedCache", "CompressedLayer", "Sizes", "bytes_per_row", "compressed_cache", "max_batch"]

HOMES = {
    "CompressedCache": "cache",
    "compressed_cache": "cache",
    "CompressedLayer": "layer",
    "bytes_per_row": "memory",
    "max_batch": "memory",
    "Sizes": "storage.sizes",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is asked for: what reads sizes alone needs no transformers."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
