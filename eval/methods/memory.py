"""Bytes that a method holds of a prompt, by its paper's formula: tokens times channels times bytes of a number.

Each choice says what it keeps (`kept_counts` in eval.methods.axes), and the sum is here. eval.cache.memory measures
what a cache's tensors really take, tables and slack included. `match` brings methods to equal bytes: the free setting
of each is moved until its formula gives the bytes wanted.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedConfig

from leank.eval.cache.storage import banded
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.segment import numbers_held
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.models import windows_of
from leank.eval.methods.axes import Held
from leank.eval.methods.base import Method
from leank.shape import kv_shape

TOLERANCE = 0.03
STEPS = 10_000  # of a setting that is a share
WHOLE = ("budget", "window")  # settings in tokens; all others are shares and accept every value in [0, 1)


def held_bytes(method: Method, held: Held) -> float:
    """Bytes of sink, window and middle, and of what choices hold in addition (bounds of pages, scores of tokens)."""
    layers, layout = range(len(held.middle)), method.layout()
    codecs: Sequence[Codec | None] = [None] * len(layers)
    if layout is not None:
        codecs = banded.codecs(layout)
    elif method.bits is not None:
        codecs = [method.bits.sized(index, held) for index in layers]
    total = 2 * held.dim * held.itemsize * held.ends.sum()
    for codec, tokens, k, v in zip(codecs, held.middle, held.k, held.v, strict=True):
        if codec is None:
            total += sum(numbers_held(tokens, k, v, held.dtype))
        else:
            total += sum(codec.held(tokens[None], k[None], held.dim, held.dtype))
    return float(total + sum(choice.extra_bytes(held) for choice in method.axes.values()))


def method_bytes(method: Method, config: PreTrainedConfig, length: int, itemsize: int) -> float | None:
    """Bytes held of a prompt of `length` tokens; None if they depend on the prompt and not on settings alone.

    itemsize: bytes of a number. Raises ValueError for settings that make no sense.
    """
    layers, heads, dim = kv_shape(config)
    all_of_it, everywhere = [length] * layers, np.full((layers, heads), dim)
    passes = (all_of_it, all_of_it) if method.prefill is None else method.prefill.kept_counts(config, length)
    widths = (everywhere, everywhere) if method.channels is None else method.channels.kept_counts(config, length)
    if passes is None or widths is None:
        return None
    windows = windows_of(config)
    found = set()  # of the fewest and the most tokens that a layer may get; the prompt decides if they differ
    for columns in passes:
        held = _held(method, config, windows, np.array(columns)[:, None], widths, itemsize)
        sliding = _sliding_bytes(config, windows, length, itemsize)
        found.add(None if held is None else held_bytes(method, held) + sliding)
    return found.pop() if len(found) == 1 else None


def _held(
    method: Method,
    config: PreTrainedConfig,
    windows: list[int | None],
    columns: np.ndarray,
    widths: tuple[np.ndarray, np.ndarray],
    itemsize: int,
) -> Held | None:
    """What layers with full attention hold of a prompt of which they get columns [L, 1]; None if the prompt decides."""
    k, v = widths
    columns = columns * np.array([window is None for window in windows])[:, None]
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
    windows = windows_of(config)
    sliding = _sliding_bytes(config, windows, length, itemsize)
    return 2 * windows.count(None) * heads * dim * length * itemsize + sliding


def _sliding_bytes(config: PreTrainedConfig, windows: list[int | None], length: int, itemsize: int) -> int:
    """Bytes that layers with sliding-window attention hold of a prompt, whatever the method."""
    _, heads, dim = kv_shape(config)
    tokens = sum(min(length, window) for window in windows if window is not None)
    return 2 * heads * dim * tokens * itemsize


def share_of_dense(method: Method, config: PreTrainedConfig, lengths: Sequence[int], itemsize: int) -> float:
    """Bytes of prompts of these lengths, over those of the dense cache. Raises ValueError if the prompts decide."""
    held = 0.0
    for length, count in Counter(lengths).items():
        one = method_bytes(method, config, length, itemsize)
        if one is None:
            raise ValueError("what it holds depends on the prompt, not on settings alone")
        held += count * one
    return held / sum(dense_bytes(config, length, itemsize) for length in lengths)


def free_settings(method: Method) -> list[str]:
    """The settings that `match` moves, as "axis.setting" or "window".

    They are all budgets of the method. Without a budget it is the first free setting of tokens, prefill, channels and
    bits, so that of two axes one stays as it is (ThinK, table 7, moves H2O's and SnapKV's budget).
    """
    free = {axis: choice.free for axis, choice in method.axes.items() if choice.free is not None}
    budgets = [f"{axis}.budget" for axis, setting in free.items() if setting == "budget"]
    others = [(axis, free[axis]) for axis in ("tokens", "prefill", "channels", "bits") if axis in free]
    first = [setting if setting == "window" else f"{axis}.{setting}" for axis, setting in others[:1]]
    return budgets or first


def match(method: Method, share: float, config: PreTrainedConfig, lengths: Sequence[int], itemsize: int) -> Method:
    """A copy of `method` whose free setting makes prompts of these lengths take `share` of their dense bytes.

    Raises ValueError, saying why, for a method that has no such setting or whose bytes stay further than 3% away.
    """
    settings = free_settings(method)
    if not settings:
        raise ValueError("it has no setting that says how much it keeps")
    whole = settings[0].rpartition(".")[2] in WHOLE
    values = range(1, max(lengths) + 1) if whole else range(STEPS)

    def made(value: int) -> Method:
        return _with(method, settings, value if whole else value / STEPS)

    def held(value: int) -> float:
        try:
            one = made(value)
        except ValueError:  # a budget below sink and window
            return 0.0
        return share_of_dense(one, config, lengths, itemsize)

    sign = 1 if held(values[0]) < held(values[-1]) else -1
    place = bisect_left(values, sign * share, key=lambda value: sign * held(value))
    near = [values[max(0, place - 1)], values[min(place, len(values) - 1)]]
    best = min(near, key=lambda value: abs(held(value) - share))
    if abs(held(best) - share) > TOLERANCE * share:
        raise ValueError(f"{' and '.join(settings)} cannot bring it there: at best it holds {held(best):.1%} of dense")
    return made(best)


def _with(method: Method, settings: Sequence[str], value: float) -> Method:
    for setting in settings:
        axis, _, name = setting.rpartition(".")
        changed = {axis: replace(getattr(method, axis), **{name: value})} if axis else {name: value}
        method = replace(method, **changed)
    return method
