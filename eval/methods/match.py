"""Methods brought to equal bytes: the free setting of each is moved until its formula gives the bytes wanted."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig

from leank.eval.methods.base import Method
from leank.eval.methods.memory import dense_bytes, method_bytes

TOLERANCE = 0.03
STEPS = 10_000  # of a setting that is a share
WHOLE = ("budget", "window")  # settings in tokens; all others are shares and accept every value in [0, 1)


def share_of_dense(method: Method, config: PreTrainedConfig, lengths: Sequence[int], itemsize: int) -> float:
    """Bytes that a method holds of prompts of these lengths together, divided by those of the dense cache.

    Raises ValueError if the bytes depend on the prompts themselves.
    """
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
    """A copy of `method` whose free setting makes the prompts together take `share` of their dense bytes.

    share: float in (0, 1].
    config: the model's.
    lengths: int, tokens: length of each prompt.
    itemsize: int, bytes: size of a number.

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
