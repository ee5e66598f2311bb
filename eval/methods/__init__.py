"""Methods by name, built from configuration.

method("think", {"channels": {"name": "think", "ratio": 0.6}}, {"sink": 16, "window": 128})
"""

from __future__ import annotations

from collections.abc import Mapping

from eval.methods.axes import Axis, Channels
from eval.methods.base import Method
from eval.methods.registry import AXES, REGISTRY, Registry, choice, name_of
from leank_train.common.typed import refuse_unknown, typed

CACHE_SETTINGS = ("sink", "window", "flush", "backend")

__all__ = ["AXES", "REGISTRY", "Axis", "Channels", "Method", "Registry", "choice", "method", "name_of"]


def method(
    label: str, config: Mapping[str, object] | None = None, shared: Mapping[str, object] | None = None
) -> Method:
    """The method called `label`.

    config: mapping, default empty: for each axis {"name": ..., its settings}, and the cache settings (sink, window,
    flush, backend) in which the method differs from `shared`. Without an axis it is the dense cache.
    shared: mapping, default empty: the cache settings of all methods.

    Raises ValueError naming the setting at fault.
    """
    config, where = dict(config or {}), f"method.{label}"
    refuse_unknown(config, (*AXES, *CACHE_SETTINGS), f"{where}.")
    refuse_unknown(shared or {}, CACHE_SETTINGS, "cache.")
    settings = {**(shared or {}), **{key: config[key] for key in CACHE_SETTINGS if key in config}}
    given = {axis: config[axis] for axis in AXES if config.get(axis) is not None}
    chosen = {axis: choice(axis, one, f"{where}.{axis}") for axis, one in given.items()}
    if not chosen and any(key in config for key in CACHE_SETTINGS):
        raise ValueError(
            f"{where} has no choice on any axis ({', '.join(AXES)}), only {', '.join(config)}; leave it out"
        )
    return typed(Method, {"label": label, **chosen, **settings}, f"{where}.")
