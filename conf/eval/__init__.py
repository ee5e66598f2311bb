"""Hydra groups of python -m leank.eval, and its main configuration, eval.yaml.

The options of the group `method` are not files: conf/method has several in each. Importing this package, as Hydra does
before it composes eval.yaml, puts them into Hydra's store. So it does with benchmarks that have no file of settings.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

AXES = ("channels", "tokens", "bits", "reads", "prefill")


def store_methods() -> None:
    """Make `method=[...]` take every preset of conf/method, and every method of eval/methods that has none.

    A preset's key is what `method=[...]` calls it, `think` or `reference/quest`; the method's label is the last part of
    the key. A preset of several methods has `labels: {LABEL: SETTINGS, ...}`. A method without a preset has the
    defaults of its class, and its settings can be overridden, too.
    """
    _store("dense", {"dense": {}})
    for axis in AXES:
        for file in files("leank.eval").joinpath("methods", axis).iterdir():
            name, dot, kind = file.name.rpartition(".")
            if (dot, kind) == (".", "py") and not name.startswith("_"):
                # not a struct: Hydra shall accept settings that are not listed here; the class checks them
                settings = OmegaConf.create({"name": name}, flags={"struct": False})
                _store(name, {name: {axis: settings}})
    for file in files("leank.conf").joinpath("method").iterdir():
        if file.name.endswith(".yaml"):
            with file.open(encoding="utf-8") as lines:
                presets: Any = OmegaConf.load(lines)
            for name in presets:
                given = presets._get_node(name)
                _store(name, given.labels if "labels" in given else {name.rpartition("/")[2]: given})


def store_benchmarks() -> None:
    """Make `benchmark=NAME` take every class of eval/benchmarks with @benchmark("NAME"), with its defaults."""
    there = {file.name for file in files("leank.conf").joinpath("eval", "benchmark").iterdir()}
    for file in files("leank.eval").joinpath("benchmarks").iterdir():
        if not file.name.endswith(".py"):
            continue
        for name in re.findall(r'^@benchmark\("(\w+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE):
            if f"{name}.yaml" not in there:
                settings = OmegaConf.create({"name": name}, flags={"struct": False})
                ConfigStore.instance().store(name, settings, "benchmark", package="benchmark", provider="benchmarks")


def method_options(group: str = "method") -> list[str]:
    """Return what `method=[...]` takes, sorted; group: "method", or "method/reference" for what stands below it."""
    options = ConfigStore.instance().list(group)
    return [option.removesuffix(".yaml") for option in options if option.endswith(".yaml")]


def _store(name: str, methods: Any) -> None:
    group, _, option = f"method/{name}".rpartition("/")
    ConfigStore.instance().store(option, methods, group, package="method", provider="conf/method")


# Hydra copies its store, a singleton, for every group that --help lists; what it loads from there is a copy anyway
ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
store_methods()
store_benchmarks()
