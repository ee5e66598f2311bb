"""Hostile settings: whatever any key holds, the answer is one line that names the key, or a job that can run.

The keys are those of the settings classes, so a new setting is tried without a word here. That pydantic holds a value
to its annotation is not tried again.
"""

import copy
import functools
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, SimpleNamespace
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import huggingface_hub
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from leank import backbone
from leank.eval.benchmarks.base import benchmarks
from leank.eval.inference.models import ModelConfig
from leank.eval.methods import CACHE_SETTINGS, REGISTRY, Method, choice_class
from leank.eval.run.build import build_job
from leank.eval.run.replay import Settings
from leank.shipped import resolve
from leank.typed import Checked, OneOf, typed
from leank.wandb_log import LoggerConfig
from leank_train import recipes
from leank_train import settings as training
from leank_train.running import parallel
from leank_train.train import check_inputs
from tests import ROOT
from tests.helpers import composed

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))  # how many to try, each time others; 0: the same 250
MASK = str(ROOT / "models/reference/mask_70pct.safetensors")
OF_CACHE = {key: get_type_hints(Method, include_extras=True)[key] for key in CACHE_SETTINGS}
SMALL = {
    "ruler": {"tasks": ["niah_single_1"], "lengths": [1024], "samples": 3},
    "niah": {"lengths": [600], "depths": [50]},
    "multi_turn": {"tasks": ["multikey"], "lengths": [1024], "samples": 2},
    "text": {"lengths": [256], "samples": 2},
    "gsm_infinite": {"subsets": ["medium"], "lengths": [0], "ops": [2], "samples": 2, "max_new_tokens": 64},
}
QUICK = {"min_length": 400, "max_length": 500, "questions": 1, "tasks": {"multikey": 1}}
TEXTS = ("", " ", "nan", "inf", "auto", "null", "true", "1e999", "0/0", "\x00", "a\nb", "a\u2028b", "\u202e", "..", "/",
         "/dev/null", "ä" * 300, "x" * 5000, "os:system", "niah_single_1", "dense", "${x}", "%s", "{}")  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(-2, 2), st.floats(),
    st.integers(3, 400).map(lambda n: 10**n), st.integers(3, 400).map(lambda n: -(10**n)), st.sampled_from(TEXTS),
    st.text(max_size=12),
)  # fmt: skip
ANYTHING = st.one_of(
    SCALARS,
    st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.none()), SCALARS, max_size=3),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4),
)


@dataclass(frozen=True)
class Setting:
    """path: keys from the top of the configuration; hint: what its class says of it; choice: what it belongs to."""

    path: tuple[str, ...]
    hint: object
    choice: str = ""

    def __str__(self):
        return ".".join((*self.choice.split(), *self.path))


def of_class(target, path=(), choice=""):
    """Every setting of a class and of the groups in it; a group is a setting, too."""
    hints = get_type_hints(target, include_extras=True)
    found = []
    for name in (field.name for field in fields(target) if not field.name.startswith("_")):
        found.append(Setting((*path, name), hints[name], choice))
        if isinstance(hints[name], type) and issubclass(hints[name], Checked):
            found += of_class(hints[name], (*path, name), choice)
    return found


def of_evaluation():
    found = [*of_class(Settings), *of_class(ModelConfig, ("model",)), *of_class(LoggerConfig, ("logger",))]
    found += [Setting((key,), object) for key in ("model", "logger", "benchmark", "method", "cache", "mask", "name")]
    for name, target in benchmarks().items():
        found += of_class(target, ("benchmark",), f"benchmark {name}")
    found += [Setting(("cache", key), hint) for key, hint in OF_CACHE.items()]
    for choice in (f"{axis} {name}" for axis, names in REGISTRY.items() for name in names):
        axis, name = choice.split()
        found += of_class(choice_class(axis, name), ("method", "fuzzed", axis), choice)
        found += [Setting(path, object, choice) for path in (("method", "fuzzed", axis), ("method", "fuzzed"))]
        found += [Setting(("method", "fuzzed", key), hint, choice) for key, hint in OF_CACHE.items()]
    return found


def near(hint):
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
        return st.dictionaries(st.sampled_from(["kv", "passkey", ""]), near(args[1]), max_size=3)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return st.lists(near(args[0]), max_size=3)
    simple = {int: st.one_of(st.integers(-1, 5000), st.integers()), float: st.floats(), str: st.sampled_from(TEXTS),
              bool: st.booleans(), NoneType: st.none()}  # fmt: skip
    return simple.get(hint, SCALARS)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Keep the reference model's config and tokenizer in memory, and the network out."""
    own = resolve("reference")

    def kept(load, changes):
        once = functools.cache(load)

        def loader(name, *args, **kwargs):
            found = once(own) if name == own else load(name, *args, **kwargs)
            return copy.deepcopy(found) if changes and name == own else found

        return loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        for kind in (backbone.AutoConfig, backbone.AutoTokenizer):
            patch.setattr(kind, "from_pretrained", kept(kind.from_pretrained, kind is backbone.AutoConfig))
        yield


@functools.cache
def base_of_training(choice=""):
    config = OmegaConf.to_container(composed.training("+experiment=reference_demo", "logger=none"), resolve=True)
    config["data"] |= QUICK
    config["validation"] |= {"lengths": [400], "tasks": ["niah_multikey_2"]}
    return config


def base_of_evaluation(choice):
    """A configuration that is quick to build. choice: "benchmark NAME", "AXIS NAME" of a method, or nothing."""
    kind, _, name = choice.partition(" ")
    benchmark = OmegaConf.to_container(
        OmegaConf.load(ROOT / f"conf/eval/benchmark/{name if kind == 'benchmark' else 'ruler'}.yaml")
    )
    benchmark |= SMALL.get(benchmark["name"], {"path": "/dev/null"})
    if name == "nolima":
        benchmark["lengths"] = [1000]  # the reference model has 8,192 positions
    method = {kind: {"name": name}} if name and kind != "benchmark" else {"channels": {"name": "random"}}
    if name.startswith("leank"):
        method["channels"]["mask"] = MASK
    if name == "by_length":
        method["channels"] |= {"below": {"name": "random"}, "above": {"name": "magnitude"}}
    model = {"name": "reference", "dtype": "auto", "chat": None, "overrides": {}, "device": "cpu"}
    compress = "before_question" if benchmark["name"] == "multi_turn" else "after_question"
    return {"model": model, "benchmark": benchmark, "method": {"fuzzed": method}, "logger": {"kind": "none"},
            "cache": {"sink": 16, "window": 144, "flush": 32}, "name": "fuzz", "mask": None,
            "compress": compress}  # fmt: skip


def describe_training(config):
    """All that training checks before it loads weights, and its first documents."""
    made = recipes.check(config)
    training.fingerprint(config)
    parallel.role(made.trainer)
    name, overrides = made.model.name, made.model.overrides
    light = SimpleNamespace(config=backbone.load_config(name, overrides))
    check_inputs(made, backbone.Backbone(light, backbone.load_tokenizer(name), name))


def describe_evaluation(config):
    """The job and its keys."""
    typed(LoggerConfig, {} if config.get("logger") is None else config["logger"], "logger.")
    job, _ = build_job(config)
    job.missing(set())


def answer(describe, config, keys):
    """Describe a configuration; what is refused must be said in one line that names one of the keys."""
    try:
        describe(config)
    except (ValueError, OSError) as error:
        said = functools.reduce(lambda said, text: said.replace(text, "..."), broken_texts(config), str(error))
        assert len(said.splitlines()) == 1, said
        parts = {part for key in keys for part in (key.path[-1], ".".join(key.path[:2]))}
        named = any(part in said for part in (*parts, *(["pruning"] if "mask" in parts else [])))
        by_path = isinstance(error, OSError) or "dev/null" in said  # the system's errors name a path
        assert named or by_path, said


def broken_texts(config):
    """The texts of several lines that a configuration holds: a message quotes them as they are."""
    if isinstance(config, dict | list):
        parts = config if isinstance(config, list) else [*config, *config.values()]
        return [text for part in parts for text in broken_texts(part)]
    return [config] if isinstance(config, str) and config and config.splitlines() != [config] else []


RECIPES = (recipes.Paper, recipes.Factors, recipes.Layouts)
TRAINING = [*{key.path: key for kind in RECIPES for key in of_class(kind)}.values(), Setting(("mask",), Mapping)]
EVALUATION = of_evaluation()
BASES = {describe_training: base_of_training, describe_evaluation: base_of_evaluation}


def test_every_key_is_found():
    assert {"stage1.lr", "data.tasks", "pruning.ratio", "trainer.devices"} <= {str(key) for key in TRAINING}
    names = {str(key) for key in EVALUATION}
    assert {"batch_size", "model.device", "cache.window", "benchmark.ruler.benchmark.lengths"} <= names
    assert "tokens.snapkv.method.fuzzed.tokens.budget" in names


def test_the_configurations_that_are_changed_are_right():
    describe_training(base_of_training())
    choices = [f"{axis} {name}" for axis, names in REGISTRY.items() for name in names]
    for choice in ["", *(f"benchmark {name}" for name in SMALL), *choices]:
        describe_evaluation(base_of_evaluation(choice))


@pytest.mark.parametrize(("describe", "keys"), [(describe_training, TRAINING), (describe_evaluation, EVALUATION)])
@settings(
    max_examples=EXAMPLES or 250, derandomize=not EXAMPLES, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
@given(data=st.data())
def test_the_answer_is_one_line_or_a_job(describe, keys, data):
    first = data.draw(st.sampled_from(keys), label="key")
    others = [key for key in keys if key.choice in ("", first.choice) and key != first]
    chosen = [first, *data.draw(st.lists(st.sampled_from(others), max_size=1), label="and")]
    config = copy.deepcopy(BASES[describe](first.choice))
    for key in chosen:
        group = config
        for part in key.path[:-1]:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if isinstance(group, dict):  # else the other value has taken the group's place
            group[key.path[-1]] = data.draw(st.one_of(ANYTHING, *2 * [near(key.hint)]), label=str(key))
    answer(describe, config, chosen)
