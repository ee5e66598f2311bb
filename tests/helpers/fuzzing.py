"""Every setting of both commands, found from the settings classes, and hostile values for it."""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import strategies as st

from leank.eval.benchmarks.base import benchmarks
from leank.eval.inference.models import ModelConfig
from leank.eval.methods import CACHE_SETTINGS, REGISTRY, Method, choice_class
from leank.eval.run.settings import Settings
from leank.typed import Checked, OneOf
from leank.wandb_log import LoggerConfig
from leank_train.settings import RunConfig

OF_CACHE = {key: get_type_hints(Method, include_extras=True)[key] for key in CACHE_SETTINGS}
TEXTS = ("", " ", "nan", "inf", "auto", "null", "true", "1e999", "0/0", "\x00", "a\nb", "a\u2028b", "\u202e", "..", "/",
         "/dev/null", "ä" * 300, "x" * 5000, "os:system", "niah_single_1", "dense", "${x}", "%s", "{}")  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """path: keys from the top of the configuration; hint: what its class says of it; choice: what it belongs to."""

    path: tuple[str, ...]
    hint: object
    choice: str = ""

    def __str__(self) -> str:
        return ".".join((*self.choice.split(), *self.path))


def of_class(target: type, path: tuple[str, ...] = (), choice: str = "") -> list[Setting]:
    """Every setting of a class and of the groups in it; a group is a setting, too."""
    hints = get_type_hints(target, include_extras=True)
    found = []
    for field in fields(target):
        if not field.name.startswith("_"):
            hint, here = hints[field.name], (*path, field.name)
            found.append(Setting(here, hint, choice))
            if isinstance(hint, type) and issubclass(hint, Checked):
                found += of_class(hint, here, choice)
    return found


def of_training() -> list[Setting]:
    return [*of_class(RunConfig), Setting(("mask",), Mapping)]


def of_evaluation() -> list[Setting]:
    found = [*of_class(Settings), *of_class(ModelConfig, ("model",)), *of_class(LoggerConfig, ("logger",))]
    found += [Setting((key,), object) for key in ("model", "logger", "benchmark", "method", "cache", "mask", "name")]
    for name, target in benchmarks().items():
        found += of_class(target, ("benchmark",), f"benchmark {name}")
    found += [Setting(("cache", key), hint) for key, hint in OF_CACHE.items()]
    for axis, names in REGISTRY.items():
        for name in names:
            choice = f"{axis} {name}"
            found += of_class(choice_class(axis, name), ("method", "fuzzed", axis), choice)
            found += [Setting(path, object, choice) for path in (("method", "fuzzed", axis), ("method", "fuzzed"))]
            found += [Setting(("method", "fuzzed", key), hint, choice) for key, hint in OF_CACHE.items()]
    return found


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(-2, 2), st.floats(),
    st.integers(3, 400).map(lambda n: 10**n), st.integers(3, 400).map(lambda n: -(10**n)), st.sampled_from(TEXTS),
    st.text(max_size=12),
)  # fmt: skip
ANYTHING = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.none()), SCALARS, max_size=3),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2), max_leaves=4),
)


def near(hint: object) -> st.SearchStrategy[object]:
    """Values at the bounds of a setting, its choices, and what its own type allows."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        numbers = [getattr(rule, name) for rule in args[1:] for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)]
        choices = [choice for rule in args[1:] if isinstance(rule, OneOf) for choice in rule.choices]
        some = [value for n in numbers for value in (n, n - 1, n + 1, float(n), n + 0.5)] + choices
        return st.one_of(st.sampled_from(some), near(args[0])) if some else near(args[0])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(near, args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(
            st.one_of(st.sampled_from(["kv", "passkey"]), st.text(max_size=4)), near(args[1]), max_size=3
        )
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return st.lists(near(args[0]), max_size=3)
    simple = {int: st.one_of(st.integers(-1, 5000), st.integers()), float: st.floats(), str: st.sampled_from(TEXTS),
              bool: st.booleans(), NoneType: st.none()}  # fmt: skip
    return simple.get(hint, SCALARS)


def fits(value: object, hint: object) -> bool:
    """Whether a value is what a setting's annotation says, by a reading of its own: no NaN, no bound passed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, args[0]) and all(holds(value, rule) for rule in args[1:])
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, str) and fits(v, args[1]) for k, v in value.items())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(one, args[0]) for one in value)
    if hint is float:
        return type(value) in (int, float) and sound(value)
    if hint in (int, bool, str, NoneType):
        return type(value) is hint and sound(value)
    return sound(value)


def holds(value: Any, rule: object) -> bool:
    """Whether a value keeps one bound."""
    checks = {Ge: lambda: value >= rule.ge, Gt: lambda: value > rule.gt, Le: lambda: value <= rule.le,
              Lt: lambda: value < rule.lt, MinLen: lambda: len(value) >= rule.min_length,
              OneOf: lambda: any(type(value) is type(c) and value == c for c in rule.choices)}  # fmt: skip
    return checks[type(rule)]() if type(rule) in checks else True


def sound(value: object) -> bool:
    """Whether no part of a value is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(sound(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return all(map(sound, value))
    return not isinstance(value, float) or math.isfinite(value)
