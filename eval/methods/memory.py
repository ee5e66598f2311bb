"""Bytes that a method holds of a prompt, by its paper's formula: tokens times channels times bytes of a number.

Each choice says what it keeps (`kept_counts` in eval.methods.axes), and the sum is here. eval.cache.memory measures
what a cache's tensors really take, tables and slack included.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedConfig

from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.models import windows_of
from leank.eval.methods.axes import Held
from leank.eval.methods.base import Method
from leank.shape import kv_shape


def held_bytes(method: Method, held: Held) -> float:
    """Bytes of sink, window and middle, and of what choices hold in addition (bounds of pages, scores of tokens)."""
    ends = 2 * held.dim * held.itemsize * held.ends.sum()
    numbers = held.itemsize * (held.middle * (held.k + held.v)).sum()
    middle = numbers if method.bits is None else method.bits.packed(held)
    return float(ends + middle + sum(choice.extra_bytes(held) for choice in method.axes.values()))


def method_bytes(method: Method, config: PreTrainedConfig, length: int, itemsize: int) -> float | None:
    """Bytes held of a prompt of `length` tokens; None if they depend on the prompt and not on settings alone.

    config: the model's.
    length: int, tokens.
    itemsize: int, bytes: size of a number.

    Raises ValueError for settings that make no sense.
    """
    layers, heads, dim = kv_shape(config)
    all_of_it, everywhere = [length] * layers, np.full((layers, heads), dim)
    passes = (all_of_it, all_of_it) if method.prefill is None else method.prefill.kept_counts(config, length)
    widths = (everywhere, everywhere) if method.channels is None else method.channels.kept_counts(config, length)
    if passes is None or widths is None:
        return None
    found = set()  # of the fewest and the most tokens that a layer may get; the prompt decides if they differ
    for columns in passes:
        held = _held(method, config, np.array(columns)[:, None], widths, itemsize)
        found.add(None if held is None else held_bytes(method, held) + _sliding_bytes(config, length, itemsize))
    return found.pop() if len(found) == 1 else None


def _held(
    method: Method, config: PreTrainedConfig, columns: np.ndarray, widths: tuple[np.ndarray, np.ndarray], itemsize: int
) -> Held | None:
    """What layers with full attention hold of a prompt of which they get columns [L, 1]; None if the prompt decides."""
    k, v = widths
    columns = columns * np.array([window is None for window in windows_of(config)])[:, None]
    ends = np.minimum(columns, method.sink + method.window)
    middle = np.broadcast_to(columns - ends, k.shape)
    if method.tokens is not None:
        kept = method.tokens.kept_counts(
            config, columns[:, 0].tolist(), Sizes(method.sink, method.window, method.flush)
        )
        if kept is None or (k.min() < k.max() and not method.tokens.settled):
            return None
        middle = np.minimum(middle, kept)
    return Held(np.broadcast_to(ends, k.shape), np.where(k > 0, middle, 0), k, v, kv_shape(config)[2], itemsize)


def dense_bytes(config: PreTrainedConfig, length: int, itemsize: int) -> int:
    """Bytes of a prompt's whole K and V, as far as layers with sliding-window attention hold it."""
    _, heads, dim = kv_shape(config)
    full = windows_of(config).count(None)
    return 2 * full * heads * dim * length * itemsize + _sliding_bytes(config, length, itemsize)


def _sliding_bytes(config: PreTrainedConfig, length: int, itemsize: int) -> int:
    """Bytes that layers with sliding-window attention hold of a prompt, whatever the method."""
    _, heads, dim = kv_shape(config)
    tokens = sum(min(length, window) for window in windows_of(config) if window is not None)
    return 2 * heads * dim * tokens * itemsize
