"""Bytes that a method holds of a prompt, by its paper's formula: tokens times channels times bytes of a number.

Each choice says what it keeps (`kept_counts` in eval.methods.axes), and the sum is here. `planned_bytes` is what a
cache's tensors take as a reply grows, slack included; eval.cache.memory measures them, and tables. `match` brings
methods to equal bytes: the free setting of each is moved until its formula gives the bytes wanted.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from transformers import PreTrainedConfig

from leank.eval.cache.storage import banded
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.segment import PAGE, grown_room, numbers_held, round_up
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
    ends = 2 * held.dim * held.itemsize * float(held.ends.sum())
    return ends + _middle_bytes(method, held) + _extra_bytes(method, held)


def _middle_bytes(method: Method, held: Held) -> float:
    layers, layout = range(len(held.middle)), method.layout()
    codecs: Sequence[Codec | None] = [None] * len(layers)
    if layout is not None:
        codecs = banded.codecs(layout)
    elif method.bits is not None:
        codecs = [method.bits.sized(index, held) for index in layers]
    total = 0
    for codec, tokens, k, v in zip(codecs, held.middle, held.k, held.v, strict=True):
        if codec is None:
            total += sum(numbers_held(tokens, k, v, held.dtype))
        else:
            total += sum(codec.held(tokens[None], k[None], held.dim, held.dtype))
    return float(total)


def _extra_bytes(method: Method, held: Held) -> float:
    return float(sum(choice.extra_bytes(held) for choice in method.axes.values()))


def method_bytes(method: Method, config: PreTrainedConfig, length: int, itemsize: int) -> float | None:
    """Bytes held of a prompt of `length` tokens; None if they depend on the prompt and not on settings alone.

    itemsize: bytes of a number. Raises ValueError for settings that make no sense.
    """
    sliding = _sliding_bytes(config, windows_of(config), length, itemsize)
    found = set()  # of the fewest and the most tokens that a layer may get; the prompt decides if they differ
    for columns in _passes(method, config, length):
        parts = _parts(method, config, length, columns, 0)
        found.add(None if parts is None else held_bytes(method, parts.held(method, config, itemsize)) + sliding)
    return found.pop() if len(found) == 1 else None


def planned_bytes(
    method: Method, config: PreTrainedConfig, prompts: Sequence[int], new: int, itemsize: int
) -> float | None:
    """Bytes that the cache of a batch takes when `new` tokens are decoded behind prompts of so many tokens each.

    Of `eval.cache.memory.Memory` all counts but the tables: room that is not filled yet, too. On a GPU a method that
    evicts has scores for spare room as well, and the window all its slots before there is a middle.
    Returns None if the prompts decide. itemsize: bytes of a number
    """
    if method.tokens is not None and not method.tokens.settled:  # which heads have spare pages
        return None
    if not method.axes:
        return float(sum(dense_bytes(config, length + new, itemsize) for length in prompts))
    sizes, total, rows = Sizes(method.sink, method.window, method.flush), 0.0, []
    for length in prompts:
        found = [_parts(method, config, length, columns, new) for columns in _passes(method, config, length)]
        parts = found[0] if found else None
        if parts is None or any(one is None or not one.takes_as(parts) for one in found):
            return None
        rows.append(parts)
        total += _middle_bytes(method, parts.room(method, config, itemsize))
        total += _extra_bytes(method, parts.held(method, config, itemsize))
        total += _sliding_bytes(config, windows_of(config), length + new, itemsize)
    _, heads, dim = kv_shape(config)
    slots = 0  # of sink and window: a batch's rows have equally many
    for layer in (index for index, window in enumerate(windows_of(config)) if window is None):
        in_window = [int(parts.ends[layer, 0]) - min(sizes.sink, int(parts.ends[layer, 0])) for parts in rows]
        slots += sizes.sink + sizes.slots(max(in_window), any(parts.left[layer, 0] > 0 for parts in rows))
    return total + 2 * heads * dim * itemsize * len(rows) * slots


def _passes(method: Method, config: PreTrainedConfig, length: int) -> Sequence[Sequence[int]]:
    """The fewest and the most of a prompt's tokens that each layer gets; empty if that is not known."""
    if method.prefill is None:
        return [[length] * kv_shape(config)[0]]
    return method.prefill.kept_counts(config, length) or []


class _Parts(NamedTuple):
    """What layers with full attention hold of a prompt and of what follows it, in tokens and channels."""

    ends: np.ndarray  # [L, 1], in sink and window
    left: np.ndarray  # [L, 1], that are in neither
    prompt: np.ndarray  # [L, H], in the prompt's middle
    reply: np.ndarray  # [L, H], that have joined the middle since
    most: int | None  # that stay of both, None = all
    k: np.ndarray  # [L, H], channels of the middle's K
    v: np.ndarray  # [L, H], of V

    def takes_as(self, other: Self) -> bool:
        """Whether it takes as many bytes."""
        mine, others = ((one.ends, one.prompt, one.reply) for one in (self, other))
        return all(map(np.array_equal, mine, others))

    def held(self, method: Method, config: PreTrainedConfig, itemsize: int) -> Held:
        """The tokens."""
        middle = self.prompt + self.reply
        middle = middle if self.most is None else np.minimum(middle, self.most)
        return Held(np.broadcast_to(self.ends, self.k.shape), middle, self.k, self.v, kv_shape(config)[2], itemsize)

    def room(self, method: Method, config: PreTrainedConfig, itemsize: int) -> Held:
        """The same with the room of the middle in place of its tokens (`eval.cache.storage.store.Store`)."""
        first = round_up(self.prompt, PAGE)
        if self.most is None:
            room = first + round_up(grown_room(self.reply), PAGE)
        else:  # one segment holds both, and tokens leave after others have come
            most = self.most + method.flush
            need = np.minimum(self.prompt + self.reply, most)
            room = np.where(need <= first, first, round_up(np.minimum(grown_room(need), most), PAGE))
        return Held(np.broadcast_to(self.ends, room.shape), room, self.k, self.v, kv_shape(config)[2], itemsize)


def _parts(method: Method, config: PreTrainedConfig, length: int, columns: Sequence[int], new: int) -> _Parts | None:
    """Of a prompt, of which each layer gets so many columns, and of `new` tokens behind; None if the prompt decides."""
    layers, heads, dim = kv_shape(config)
    everywhere = np.full((layers, heads), dim)
    widths = (everywhere, everywhere) if method.channels is None else method.channels.kept_counts(config, length)
    if widths is None:
        return None
    k, v = widths
    sizes, full = Sizes(method.sink, method.window, method.flush), [window is None for window in windows_of(config)]
    seen, behind = (np.where(full, tokens, 0)[:, None] for tokens in (columns, new))
    whole, moved = sizes.window_start(seen) - sizes.sink, sizes.moved(seen, behind)
    prompt, reply, most = np.broadcast_to(whole, k.shape), np.broadcast_to(moved, k.shape), None
    if method.tokens is not None:
        kept = method.tokens.kept_counts(config, seen[:, 0].tolist(), sizes)
        if kept is None or (k.min() < k.max() and not method.tokens.settled):
            return None
        joins, most = method.tokens.joins(config) if new else None, method.tokens.most(sizes)
        prompt, reply = np.minimum(prompt, kept), reply if joins is None else reply * joins.numpy()
    prompt, reply = (np.where(k > 0, tokens, 0) for tokens in (prompt, reply))
    return _Parts(seen + behind - whole - moved, whole + moved, prompt, reply, most, k, v)


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
