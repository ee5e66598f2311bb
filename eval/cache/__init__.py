"""Compressed caches for generate(): sink | middle | window, ragged per KV head.

cache = compressed_cache(model, ChannelMask.load("mask.safetensors"))
model.generate(**inputs, past_key_values=cache)
"""

from eval.cache.cache import CompressedCache, compressed_cache
from eval.cache.layer import CompressedLayer
from eval.cache.memory import bytes_per_row, max_batch
from eval.cache.store import Sizes

__all__ = ["CompressedCache", "CompressedLayer", "Sizes", "bytes_per_row", "compressed_cache", "max_batch"]
