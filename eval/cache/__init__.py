"""Compressed caches for generate(): sink | middle | window, ragged per KV head (LeanK, sections 3.3 and 4.3).

    cache = compressed_cache(model, "mask.safetensors")
    model.generate(**inputs, past_key_values=cache)

Reads top down: cache (a model's), layer (transformers' side), middle (a layer's choices), store (what is held), sizes,
pages (the ragged middle), quantised (the same in few bits), channels (which channels stay), eviction (which tokens
leave), dense, batched and reference (attention in PyTorch), backend, launch, work, kernel, kernel_middle,
quantised_kernel (attention in Triton), hook (the two registrations), memory (bytes).
"""

from eval.cache.cache import CompressedCache, compressed_cache
from eval.cache.layer import CompressedLayer
from eval.cache.memory import bytes_per_row, max_batch
from eval.cache.storage.store import Sizes

__all__ = ["CompressedCache", "CompressedLayer", "Sizes", "bytes_per_row", "compressed_cache", "max_batch"]
