"""Methods by name, built from configuration.

method("think", {"channels": {"name": "think", "ratio": 0.6}}, {"sink": 16, "window": 128})
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eval.methods.axes import Axis, Channels
from eval.methods.base import AXES, Method

# axis -> name -> "module:class"; imported when first used
REGISTRY: dict[str, dict[str, str]] = {
    "channels": {
        "leank": "eval.methods.leank:LeanK",
        "by_length": "eval.methods.by_length:ByLength",
        "double_sparsity_channels": "eval.methods.double_sparsity_channels:DoubleSparsityChannels",
        "iap": "eval.methods.iap:IAP",
        "leank_budget": "eval.methods.leank_budget:LeanKBudget",
        "lowest_frequencies": "eval.methods.lowest_frequencies:LowestFrequencies",
        "magnitude": "eval.methods.magnitude:Magnitude",
        "random": "eval.methods.random:Random",
        "static_norm": "eval.methods.static_norm:StaticNorm",
        "think": "eval.methods.think:ThinK",
    },
    "tokens": {
        "duo_attention": "eval.methods.duo_attention:DuoAttention",
        "h2o": "eval.methods.h2o:H2O",
        "lethe": "eval.methods.lethe:Lethe",
        "pyramidkv": "eval.methods.pyramidkv:PyramidKV",
        "snapkv": "eval.methods.snapkv:SnapKV",
        "streaming_llm": "eval.methods.streaming_llm:StreamingLLM",
    },
    "bits": {
        "kivi": "eval.methods.kivi:KIVI",
    },
    "reads": {
        "double_sparsity": "eval.methods.double_sparsity:DoubleSparsity",
        "quest": "eval.methods.quest:Quest",
    },
    "prefill": {
        "asl": "eval.methods.asl:ASL",
        "fastkv": "eval.methods.fastkv:FastKV",
        "gemfilter": "eval.methods.gemfilter:GemFilter",
        "pyramid_infer": "eval.methods.pyramid_infer:PyramidInfer",
    },
}
SIZES = {"sink": 0, "window": 1, "flush": 1}  # and their least values

__all__ = ["AXES", "REGISTRY", "Axis", "Channels", "Method", "choice", "method", "name_of"]


def method(label: str, config: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None) -> Method:
    """The method called `label`.

    config: of each axis {"name": ..., its settings}, and what it sets apart from `shared` (sink, window, flush,
    backend); no axis = the dense cache. Raises ValueError naming the setting at fault.
    """
    config = dict(config or {})
    where = f"method.{label}"
    known = (*SIZES, "backend")
    _only(config, (*AXES, *known), where)
    _only(shared or {}, known, "cache")
    settings = {**(shared or {}), **{key: config[key] for key in known if key in config}}
    for key, least in SIZES.items():
        if key in settings and (not isinstance(settings[key], int) or settings[key] < least):
            raise ValueError(f"{where}: {key}={settings[key]!r} must be an integer of at least {least}")
    chosen = {axis: choice(axis, config[axis], f"{where}.{axis}") for axis in AXES if config.get(axis) is not None}
    return Method(label, **chosen, **settings)


def choice(axis: str, config: Mapping[str, Any], where: str) -> Any:
    """The choice on one axis that `config` describes, {"name": ..., its settings}; errors begin with `where`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}={config!r} is no choice; give {{name: {config}}}, with its settings if any")
    given = dict(config)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in REGISTRY[axis]:
        raise ValueError(f"{where}.name={name!r} is unknown; choose one of {', '.join(REGISTRY[axis])}")
    chosen = _class(REGISTRY[axis][name])
    _only(given, tuple(f.name for f in fields(chosen) if not f.name.startswith("_")), where)  # type: ignore[arg-type]
    for entry in fields(chosen):  # type: ignore[arg-type]
        wanted = type(entry.default)
        if entry.name in given and wanted in (int, float):
            value = given[entry.name]
            if isinstance(value, bool) or not isinstance(value, int if wanted is int else int | float):
                raise ValueError(f"{where}.{entry.name}={value!r} must be a number ({wanted.__name__})")
    return chosen(**given)


def name_of(choice: Axis) -> str:
    """The registered name of a choice, or its class's."""
    target = f"{type(choice).__module__}:{type(choice).__name__}"
    return next((name for names in REGISTRY.values() for name, known in names.items() if known == target), target)


def _class(target: str) -> type[Axis]:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


def _only(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where}.{unknown[0]} is no setting; there are {', '.join(known)}")
