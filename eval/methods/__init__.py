"""Methods by name, built from configuration.

method("think", {"channels": {"name": "think", "ratio": 0.6}}, {"sink": 16, "window": 128})
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from eval.methods.base import Channels, Method

# name -> "module:class"; imported when first used
CHANNELS = {
    "leank": "eval.methods.leank:LeanK",
    "lowest_frequencies": "eval.methods.lowest_frequencies:LowestFrequencies",
    "random": "eval.methods.random:Random",
    "static_norm": "eval.methods.static_norm:StaticNorm",
    "think": "eval.methods.think:ThinK",
}

__all__ = ["CHANNELS", "Channels", "Method", "method", "name_of"]


def method(label: str, config: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None) -> Method:
    """The method called `label`.

    config: `channels` ({"name": ..., its settings}) and what it sets apart from `shared` (sink, window, flush,
    backend); empty = the dense cache. Raises ValueError naming the setting at fault.
    """
    config = dict(config or {})
    where = f"method.{label}"
    known = ("sink", "window", "flush", "backend")
    _only(config, ("channels", *known), where)
    _only(shared or {}, known, "cache")
    settings = {**(shared or {}), **{key: config[key] for key in known if key in config}}
    channels = config.get("channels")
    if channels is None:
        return Method(label, None, **settings)
    channels = dict(channels)
    name = channels.pop("name", None)
    if name not in CHANNELS:
        raise ValueError(f"{where}.channels.name={name!r} is unknown; choose one of {', '.join(CHANNELS)}")
    for key, least in (("sink", 0), ("window", 1), ("flush", 1)):
        if key in settings and (not isinstance(settings[key], int) or settings[key] < least):
            raise ValueError(f"{where}: {key}={settings[key]!r} must be an integer of at least {least}")
    chosen = _class(name)
    _only(channels, tuple(f.name for f in fields(chosen) if not f.name.startswith("_")), f"{where}.channels")  # type: ignore[arg-type]
    for entry in fields(chosen):  # type: ignore[arg-type]
        value = channels.get(entry.name)
        wanted = type(entry.default)
        if value is not None and entry.default is not MISSING and wanted in (int, float):
            fits = isinstance(value, int | float) if wanted is float else isinstance(value, int)
            if not fits or isinstance(value, bool):
                raise ValueError(f"{where}.channels.{entry.name}={value!r} must be a number ({wanted.__name__})")
    return Method(label, chosen(**channels), **settings)


def name_of(channels: Channels) -> str:
    """The registered name of a choice, or its class's."""
    target = f"{type(channels).__module__}:{type(channels).__name__}"
    return next((name for name, known in CHANNELS.items() if known == target), target)


def _class(name: str) -> type[Channels]:
    module, attribute = CHANNELS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def _only(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where}.{unknown[0]} is no setting; there are {', '.join(known)}")
