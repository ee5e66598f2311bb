"""Methods by name, built from configuration.

build_method("think", {"channels": {"name": "think", "ratio": 0.6}}, {"sink": 16, "window": 128})
"""

from leank.eval.methods.axes import Axis, Channels
from leank.eval.methods.base import Method
from leank.eval.methods.registry import AXES, REGISTRY, choice, choice_class, name_of
from leank.typed import group, refuse_unknown, typed

CACHE_SETTINGS = ("sink", "window", "flush", "backend")

__all__ = [
    "AXES",
    "CACHE_SETTINGS",
    "REGISTRY",
    "Axis",
    "Channels",
    "Method",
    "build_method",
    "choice",
    "choice_class",
    "name_of",
]


def build_method(label: str, config: object = None, shared: object = None) -> Method:
    """The method called `label`. Raises ValueError naming the setting at fault.

    config: for each axis {"name": ..., its settings}, and the cache settings (sink, window, flush, backend) in which it
      differs from `shared`, those of all methods. Without an axis it is the dense cache.
    """
    where = f"method.{label}"
    config = {} if config is None else group(config, where)
    shared = {} if shared is None else group(shared, "cache")
    refuse_unknown(config, (*AXES, *CACHE_SETTINGS), f"{where}.")
    refuse_unknown(shared, CACHE_SETTINGS, "cache.")
    settings = {**shared, **{key: config[key] for key in CACHE_SETTINGS if key in config}}
    given = {axis: config[axis] for axis in AXES if config.get(axis) is not None}
    chosen = {axis: choice(axis, one, f"{where}.{axis}") for axis, one in given.items()}
    if not chosen and any(key in config for key in CACHE_SETTINGS):
        raise ValueError(
            f"{where} has no choice on any axis ({', '.join(AXES)}), only {', '.join(config)}; leave it out"
        )
    made = typed(Method, {"label": label, **chosen, **settings}, f"{where}.")
    typed(Method, {"label": label, **shared}, "cache.")  # what this method replaces must make sense, too
    return made
