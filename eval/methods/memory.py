"""Bytes that a method holds of a prompt, by its paper's formula: tokens times channels times bytes of a number.

Each choice says what it keeps (`kept_counts` in eval.methods.axes), and the sum is here. eval.cache.memory measures
what a cache's tensors really take, tables and slack included.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedConfig

from eval.cache.storage.sizes import Sizes
from eval.inference.models import shape_of
from eval.methods.base import Method
from eval.methods.held import Held


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
    layers, heads, dim = shape_of(config)
    all_of_it, everywhere = [length] * layers, np.full((layers, heads), dim)
    passes = (all_of_it, all_of_it) if method.prefill is None else method.prefill.kept_counts(config, length)
    widths = (everywhere, everywhere) if method.channels is None else method.channels.kept_counts(config, length)
    if passes is None or widths is None:
        return None
    found = set()
    for columns in passes:
        held = _held(method, config, np.array(columns)[:, None], widths, itemsize)
        found.add(None if held is None else held_bytes(method, held))
    return found.pop() if len(found) == 1 else None


def _held(
    method: Method, config: PreTrainedConfig, columns: np.ndarray, widths: tuple[np.ndarray, np.ndarray], itemsize: int
) -> Held | None:
    """What is held of a prompt whose layers get columns [L, 1] of it; None if that depends on the prompt."""
    k, v = widths
    ends = np.minimum(columns, method.sink + method.window)
    middle = np.broadcast_to(columns - ends, k.shape)
    if method.tokens is not None:
        kept = method.tokens.kept_counts(
            config, columns[:, 0].tolist(), Sizes(method.sink, method.window, method.flush)
        )
        if kept is None or (k.min() < k.max() and not method.tokens.settled):
            return None
        middle = np.minimum(middle, kept)
    return Held(np.broadcast_to(ends, k.shape), np.where(k > 0, middle, 0), k, v, shape_of(config)[2], itemsize)


def dense_bytes(config: PreTrainedConfig, length: int, itemsize: int) -> int:
    """Bytes of a prompt's whole K and V."""
    layers, heads, dim = shape_of(config)
    return 2 * layers * heads * dim * length * itemsize
