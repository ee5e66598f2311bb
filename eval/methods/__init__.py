"""Methods by name, built from configuration.

method("think", {"channels": {"name": "think", "ratio": 0.6}}, {"sink": 16, "window": 128})
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from eval.methods.axes import Axis, Bits, Channels, PromptPass, Reads, Tokens
from eval.methods.base import AXES, Method
from leank_train.common.typed import refuse_unknown, typed

# axis -> name -> "module:class"; imported when first used
REGISTRY: dict[str, dict[str, str]] = {
    "channels": {
        "leank": "eval.methods.channels.leank:LeanK",
        "by_length": "eval.methods.channels.by_length:ByLength",
        "double_sparsity_channels": "eval.methods.channels.double_sparsity_channels:DoubleSparsityChannels",
        "iap": "eval.methods.channels.iap:IAP",
        "leank_budget": "eval.methods.channels.leank_budget:LeanKBudget",
        "lowest_frequencies": "eval.methods.channels.lowest_frequencies:LowestFrequencies",
        "magnitude": "eval.methods.channels.magnitude:Magnitude",
        "random": "eval.methods.channels.random:Random",
        "static_norm": "eval.methods.channels.static_norm:StaticNorm",
        "think": "eval.methods.channels.think:ThinK",
    },
    "tokens": {
        "duo_attention": "eval.methods.tokens.duo_attention:DuoAttention",
        "h2o": "eval.methods.tokens.h2o:H2O",
        "lethe": "eval.methods.tokens.lethe:Lethe",
        "pyramidkv": "eval.methods.tokens.pyramidkv:PyramidKV",
        "snapkv": "eval.methods.tokens.snapkv:SnapKV",
        "streaming_llm": "eval.methods.tokens.streaming_llm:StreamingLLM",
    },
    "bits": {
        "kivi": "eval.methods.bits.kivi:KIVI",
    },
    "reads": {
        "double_sparsity": "eval.methods.reads.double_sparsity:DoubleSparsity",
        "quest": "eval.methods.reads.quest:Quest",
    },
    "prefill": {
        "asl": "eval.methods.prefill.asl:ASL",
        "fastkv": "eval.methods.prefill.fastkv:FastKV",
        "gemfilter": "eval.methods.prefill.gemfilter:GemFilter",
        "pyramid_infer": "eval.methods.prefill.pyramid_infer:PyramidInfer",
    },
}
CLASSES: dict[str, type[Axis]] = {
    "channels": Channels, "tokens": Tokens, "bits": Bits, "reads": Reads, "prefill": PromptPass,
}  # fmt: skip
OF_CACHE = ("sink", "window", "flush", "backend")

__all__ = ["AXES", "REGISTRY", "Axis", "Channels", "Method", "choice", "method", "name_of"]


def method(label: str, config: Mapping[str, Any] | None = None, shared: Mapping[str, Any] | None = None) -> Method:
    """The method called `label`.

    config: of each axis {"name": ..., its settings}, and what it sets apart from `shared` (sink, window, flush,
    backend); no axis = the dense cache. Raises ValueError naming the setting at fault.
    """
    config = dict(config or {})
    where = f"method.{label}"
    refuse_unknown(config, (*AXES, *OF_CACHE), f"{where}.")
    refuse_unknown(shared or {}, OF_CACHE, "cache.")
    settings = {**(shared or {}), **{key: config[key] for key in OF_CACHE if key in config}}
    chosen = {axis: choice(axis, config[axis], f"{where}.{axis}") for axis in AXES if config.get(axis) is not None}
    if not chosen and any(key in config for key in OF_CACHE):
        raise ValueError(
            f"{where} has no choice on any axis ({', '.join(AXES)}), only {', '.join(config)}; leave it out"
        )
    return typed(Method, {"label": label, **chosen, **settings}, f"{where}.")


def choice(axis: str, config: Mapping[str, Any], where: str) -> Any:
    """The choice on one axis that `config` describes, {"name": ..., its settings}; errors begin with `where`.

    name: one of REGISTRY, or "module:class" of a choice that is not there. Its module is imported, so that a
    configuration with such a name is trusted as code is.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}={config!r} is no choice; give {{name: {config}}}, with its settings if any")
    given = dict(config)
    name = given.pop("name", None)
    if not isinstance(name, str) or (name not in REGISTRY[axis] and ":" not in name):
        known = ", ".join(REGISTRY[axis])
        raise ValueError(f"{where}.name={name!r} is unknown; choose one of {known}, or module:class")
    try:
        chosen = _class(REGISTRY[axis].get(name, name))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}.name={name!r} cannot be imported: {error}; give module:class") from error
    if not (isinstance(chosen, type) and issubclass(chosen, CLASSES[axis]) and is_dataclass(chosen)):
        raise ValueError(
            f"{where}.name={name!r} is no choice of {axis}; give a dataclass that subclasses {CLASSES[axis].__name__} "
            "of eval/methods/axes.py"
        )
    return typed(chosen, given, f"{where}.")


def name_of(choice: Axis) -> str:
    """The registered name of a choice, or its class's."""
    target = f"{type(choice).__module__}:{type(choice).__name__}"
    return next((name for names in REGISTRY.values() for name, known in names.items() if known == target), target)


def _class(target: str) -> type[Axis]:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)
