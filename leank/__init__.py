"""LeanK: K caches that keep only the channels that a learned mask names.

from leank import ChannelMask, compressed_cache
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leank.eval.cache import compressed_cache
    from leank.mask import ChannelMask

__all__ = ["ChannelMask", "compressed_cache"]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is asked for: data generation and `--help` need no torch."""
    if name == "ChannelMask":
        from leank.mask import ChannelMask

        return ChannelMask
    if name == "compressed_cache":
        from leank.eval.cache import compressed_cache

        return compressed_cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
